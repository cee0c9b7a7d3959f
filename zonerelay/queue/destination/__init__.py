"""The state of one destination: its queued mail, its suspension, its recent results, its rates and its route
lookups.

Every module is pure: it reads no clock and awaits nothing.

Code outside queue/ imports `Destination` alone, to show it.
"""
