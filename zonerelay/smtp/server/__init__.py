"""The server side of SMTP as functions of bytes and text: commands, paths, parameters, SASL, dot-stuffing,
BDAT.

Nothing here does I/O. Parsers raise `paths.CommandError`, whose `reply` is sent to the client.
"""
