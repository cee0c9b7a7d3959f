"""One zone: `claims` ask the store, `window` bounds what waits, `plan` chooses, `attempts` carry it out.

`plan` and `window` are pure; `zone` does what they decide.

Code outside takes `parts`, which it hands to the scheduler.
"""
