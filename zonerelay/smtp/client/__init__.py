"""The client's half of SMTP as values: `transaction` (DATA) and `chunked` (BDAT) are its state machines. No
I/O.

`script` writes the commands with their DSN parameters, `replies` and `extensions` parse what the peer
says, `stuffing` frames a body, `sasl` logs in, `reputation` reads refusals.
"""
