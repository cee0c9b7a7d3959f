"""Handles operators' requests in a worker, and serves the sockets on which they arrive.

`handler` has a method for each operation, `runner` runs it for all clients, `client` sends requests to a
relay over its control socket, and `explain` determines the route of mail for an address.
"""
