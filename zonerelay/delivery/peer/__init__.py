"""The other end of a connection: `connection_key` says which connections suit a batch, `sockets` opens them.

`expiring_set` remembers hosts for a while.

Code outside takes `connection_key` and `sockets`, to explain a message.
"""
