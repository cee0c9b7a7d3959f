"""What becomes of a delivery after its attempt: `settler` decides by `disposition` and `retry` and writes.

`outcome_log` holds the writes until the store has them; `bounces` makes the reports to senders.

Code outside takes `settler`, and `retry` for the policy that it decides by.
"""
