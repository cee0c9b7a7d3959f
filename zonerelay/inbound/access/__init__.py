"""Identifies clients and decides what they may send: networks, passwords, [[access]] rules, sender domains.

Code outside inbound/ imports `guard`, which also explains the limits of a user.
"""
