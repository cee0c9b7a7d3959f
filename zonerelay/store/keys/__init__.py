"""Ordered maps of bytes with one writer each, and the engines that store them.

`[spool] backend = "memory"` and `"disk"` are based on this package.

- `port`: the types, the promises and the errors. Read this first.
- `partition`: the writer of one partition. It groups writes, numbers them, finds out whether an unanswered
  write was stored, renews the lease, and refuses a store that has an older state. `SeenFile` is the file in
  which a machine records how far a partition had come.
- `memory`, `postgres`, `redis`: the engines, and `store/objects` on a `directory` or `s3`.
- `check`: the comparison and the repair of the records of a partition.

`store/queue` has the queue on a partition of any engine, in the layout of docs/store/spool-format.md.

`tests/store/keys/test_contract.py` tests every engine.
"""
