"""Source addresses: `selection` draws the source of a message and keeps refusals.

Code outside takes `selection`.
"""
