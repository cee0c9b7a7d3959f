"""What the operations of the catalogue do in a worker, and the sockets through which they are asked for.

`handler` has a method for each operation, `runner` runs it for everybody who asks, `client` asks a relay over
its control socket, `explain` has the route of mail for an address, and `status` the figures of `zonerelay
status` and of the queue gauges.
"""
