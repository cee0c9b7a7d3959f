"""Receives mail: listeners, SMTP sessions, and the processing of each message until it is stored.

`listen` accepts connections, `session` speaks SMTP on one of them, and `cleanup` brings a message to the
store. `access`, `limits`, `policy` and `tls` decide and protect. `state` holds the objects that the commands
of a session share.

Code outside this package uses `cleanup.submit` (the function that submits a message), `listen.listeners` (all
listeners of a worker) and, for operators' code, `policy`. Each sub-package lists what else code outside may
import; the import contracts in pyproject.toml reject everything else.
"""
