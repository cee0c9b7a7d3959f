"""Source addresses: `selection` is the face; `choice` draws the source of a message, `penalties` keeps
refusals.

Code outside takes `selection`.
"""
