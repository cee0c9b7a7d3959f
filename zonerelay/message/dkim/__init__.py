"""DKIM (RFC 6376): `keys` finds the keys of an author, `signature` finds the author's domain and signs,
`body` hashes bodies.

`dns_record` writes and judges the record of a key. `keys` is the only module that imports cryptography, so it
is imported only with a [[dkim]] entry.

All modules are for code outside.
"""
