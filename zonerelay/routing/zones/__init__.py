"""Chooses the zone of a recipient: `zones.Zones` is the entry point, and `route_rules` has the conditions of
a `[[route]]`.

`address_patterns` matches addresses against configured patterns, also for access rules and users.

Code outside may import all modules.
"""
