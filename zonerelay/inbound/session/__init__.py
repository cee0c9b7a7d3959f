"""One SMTP session: `session` moves bytes, `conversation` answers command lines, `transport` handles PROXY
and TLS, and `admission` counts connections.

Code outside inbound/ imports no module of this package.
"""
