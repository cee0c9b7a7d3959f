"""Source addresses: `selection` is the face and draws the source of a message; `penalties` keeps
refusals.

Code outside takes `selection`.
"""
