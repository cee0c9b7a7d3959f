"""Settles deliveries after an attempt: `settler` decides their fate with the policy in `retry`, and writes
the result.

It keeps the writes until the store has accepted them. `bounces` makes the reports to senders.

Code outside imports `settler`, `retry` for its retry policy, and `bounces` for messages of the relay itself.
"""
