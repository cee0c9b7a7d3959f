"""Destinations of mail: `mx.MxRouter` finds a domain's hosts, and `route` has the values that it returns.

`route` also has the batch that the queue passes to a courier. `mx` also applies [[destination]] tables and
MTA-STS to a route. Code outside may import all modules.
"""
