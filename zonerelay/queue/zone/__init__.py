"""Sends the mail of one zone: `zone` claims and attempts it, `plan` chooses the next batch, and `window`
limits the mail in memory.

`plan` and `window` are pure. `zone` carries out their decisions.

Code outside imports `ZoneParts` of `zone`, which it passes to the scheduler.
"""
