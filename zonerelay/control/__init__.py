"""The control socket, a Unix socket through which operators ask the relay and command it.

`messages` has the requests and answers, `socket` the two ends, `explain` the route of mail for an address,
`handler` the answers of a worker, and `status` the figures of `zonerelay status` and of the queue gauges.
"""
