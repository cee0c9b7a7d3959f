"""Implements the queue on ordered keys: one store with a single writer, the same for every engine.

`store` accepts, claims and settles mail, and a `keeper` keeps it usable. `reads` reads the keys. `claims`,
`cursors` and `ready` find the mail that is due, and `in_flight` plans the writes and has the state that is
not yet durable. `body` writes bodies. `reservations` stores a message with an idempotency key only once, and
`key_index` shares these keys between workers. `store/check` finds and repairs records that contradict each
other.
"""
