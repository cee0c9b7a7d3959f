"""One zone: `zone` claims its mail and attempts its batches, `plan` chooses the next batch, and `window`
bounds the mail in memory.

`plan` and `window` are pure. `zone` carries out their decisions.

Code outside imports `ZoneParts` of `zone`, which it passes to the scheduler.
"""
