"""The other end of a connection: `connection_key` says which connections suit a batch, `sockets`
opens them.
"""
