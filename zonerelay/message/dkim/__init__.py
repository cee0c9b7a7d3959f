"""DKIM (RFC 6376): `keys` finds the keys of an author, `signature` signs, `body` hashes bodies.

`authors` reads the author's domain, `dns_record` writes and judges the record of a key. `private_keys` is the
only module that imports cryptography, so `keys` is imported only with a [[dkim]] entry.

All modules are for code outside.
"""
