"""Listening sockets: `listeners` owns those of a worker, `listener` one address and its sessions.

`binding` makes sockets and says in words why an address cannot be used; `sibling_sockets` accepts clients
that wait at the socket of another worker.

Code outside takes `listeners`, `listener` for its error, and `binding`, with which the supervisor binds for
all workers.
"""
