"""What becomes of a delivery after its attempt: `settler` decides by `disposition` and `retry` and writes.

`outcome_log` holds the writes until the store has them; `bounces` makes the reports to senders.

Code outside takes `settler`, `retry` for the policy that it decides by, and `bounces` for a message of the
relay's own.
"""
