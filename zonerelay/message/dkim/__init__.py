"""DKIM (RFC 6376): `keys` finds the keys of an author and judges their DNS records, `signature` finds the
author's domain, hashes bodies and signs.

`keys` is the only module that imports cryptography, so it is imported only with a [[dkim]] entry.

All modules are for code outside.
"""
