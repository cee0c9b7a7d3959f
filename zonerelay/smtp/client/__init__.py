"""The client side of SMTP without I/O; `transaction` has the state machines for DATA and BDAT. No I/O.

`script` writes the commands with their DSN parameters, `replies` and `extensions` parse what the peer
says, `stuffing` frames a body, `sasl` logs in, `reputation` reads refusals.
"""
