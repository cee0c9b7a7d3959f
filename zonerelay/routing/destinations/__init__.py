"""Finds where mail is sent: `mx.MxRouter` finds the hosts of a domain, and `route` defines the results.

`route` also has the batch that the queue passes to a courier. `mx` also applies [[destination]] tables and
MTA-STS to a route. Code outside may import all modules.
"""
