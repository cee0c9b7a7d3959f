"""The state of one destination: the order of its mail, its suspension, its standing, its rates and its
look-ups.

Every module is pure: it reads no clock and awaits nothing.

Code outside queue/ imports none of these modules.
"""
