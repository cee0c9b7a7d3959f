"""The control socket, a Unix socket through which operators ask the relay and command it.

`messages` are what travels, `socket` the two ends, `explain` answers where mail would go, `handler` answers
requests in a worker, and `status` composes what `zonerelay status` and the queue gauges say.
"""
