"""Implements the operations of the catalogue in a worker, and the sockets that serve them.

`handler` has a method for each operation, `runner` runs it for all clients, `client` sends requests to a
relay over its control socket, `explain` determines the route of mail for an address, and `status` collects
the numbers of `zonerelay status` and of the queue gauges.
"""
