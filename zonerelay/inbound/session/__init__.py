"""One SMTP session: `session` reads and writes bytes, `conversation` executes commands, `transport` handles
PROXY and TLS, and `admission` counts connections.

Code outside inbound/ imports no module of this package.
"""
