"""Writes a message in seven bits (RFC 6152 3, RFC 6531 3.6) for hosts that take no other. No I/O.

`fields` writes header fields, `encoding` whole messages as a stream. What cannot be written without a loss
raises NotConvertibleError: an address beyond ASCII, a part that a signature covers, octets beyond ASCII where
no encoding is allowed.

All modules are for code outside.
"""
