"""The client side of SMTP without I/O; `transaction` has the state machines for DATA and BDAT. No I/O.

`script` writes the commands with their DSN parameters, `replies` and `extensions` parse the peer's replies,
`stuffing` encodes a body, `sasl` logs in, and `reputation` classifies refusals.
"""
