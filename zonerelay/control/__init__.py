"""Implements the operations of the catalogue in a worker, and the sockets that serve them.

`handler` has a method for each operation, `runner` runs it for all clients, `client` sends requests to a
relay over its control socket, and `explain` determines the route of mail for an address.
"""
