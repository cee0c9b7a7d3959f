"""The client's half of SMTP as values: `transaction` (DATA) and `chunked` (BDAT) are its state machines. No
I/O.

`script` writes the commands, `replies` and `extensions` parse what the peer says, `stuffing` and
`chunk_lines` frame a body, `sasl` logs in, `dsn` writes DSN parameters, `reputation` reads refusals.
"""
