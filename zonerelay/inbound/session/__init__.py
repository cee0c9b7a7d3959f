"""One SMTP session: `session` moves bytes, `commands` answers command lines, `transport` handles PROXY and
TLS.

`admission` counts connections, and `conversation` holds the state that the commands share.

Code outside inbound/ imports no module of this package.
"""
