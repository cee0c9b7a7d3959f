"""DKIM (RFC 6376): `keys` finds the keys for an author's domain and checks their DNS records, and `signature`
signs messages.

`keys` is the only module that imports cryptography, so it is imported only with a [[dkim]] entry.

All modules are for code outside.
"""
