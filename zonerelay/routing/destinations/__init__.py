"""Destinations of mail: `mx.MxRouter` finds a domain's hosts, `route` has the values that it returns.

`route` also has the batch that the queue hands to a courier. `destination_table` applies
[[destination]] tables and MTA-STS to a route. All modules are for code outside.
"""
