"""Destinations of mail: `mx.MxRouter` finds a domain's hosts, `nexthop` has the values that it returns.

`terms` applies [[destination]] tables (`destination_table`) and MTA-STS to a route.
"""
