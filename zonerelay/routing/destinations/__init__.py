"""Destinations of mail: `mx.MxRouter` finds a domain's hosts, `route` has the values that it returns.

`terms` applies [[destination]] tables (`destination_table`) and MTA-STS to a route.

`batch` is what the queue hands to a courier. All modules but `terms` are for code outside.
"""
