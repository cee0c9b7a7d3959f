"""The zone of a recipient: `zones.Zones` is the face, `route_rules` has the conditions of one `[[route]]`.

`address_patterns` matches addresses against patterns of the configuration, also for access rules and users.

All modules are for code outside.
"""
