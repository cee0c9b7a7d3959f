"""Identifies clients and decides what they may do: networks, logins, [[access]] rules, sender domains, user
limits.

Code outside inbound/ imports `guard`, which also explains the limits of a user.
"""
