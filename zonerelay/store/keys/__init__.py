"""Ordered maps of byte strings, each with a single writer.

- `port`: the types, the promises and the errors of an engine. Read this first.
- `partition`: the writer of one partition. It groups writes, numbers them, finds out whether an unanswered
  write was stored, renews the lease, and refuses a store that has an older state. `SeenFile` is the file in
  which a machine records how far a partition had come.
- `group_commit`: combines concurrent writes into one, which is synced once.

`store/queue` stores the queue in these keys, in the layout of docs/store/spool-format.md.
`tests/store/keys/test_contract.py` tests every engine.
"""
