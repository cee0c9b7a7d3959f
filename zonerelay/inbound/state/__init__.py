"""The state that the commands of a session share, without I/O: context, client and transaction.

`replies` defines every reply of the server; `context` also handles the checks that must be awaited before a
reply.

Code outside inbound/ imports `transaction` and `context`, to explain a message.
"""
