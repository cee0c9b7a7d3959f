"""One zone: `claims` fetches from the store, `window` bounds the mail in memory, `plan` chooses the next
batch, and `attempts` delivers it.

`plan` and `window` are pure. `zone` carries out their decisions.

Code outside imports `parts`, which it passes to the scheduler.
"""
