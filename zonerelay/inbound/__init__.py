"""Receives mail: listeners, SMTP sessions, and the way of one message into the store.

`listen` accepts connections, `session` speaks SMTP on one of them, `cleanup` takes a message to the store.
`access`, `limits`, `policy` and `tls` decide and protect; `state` holds what the commands of a session share.

Code outside takes `cleanup.submit`, the call by which mail comes in, `listen.listeners` (all listeners of a
worker) and, for operators' code, `policy`. Each
sub-package says what else is for code outside: the import contracts in pyproject.toml refuse others.
"""
