"""Ordered maps of bytes with one writer each, and the engines that store them.

`[spool] backend = "memory"` and `"disk"` are based on this package.

- `port`: the types, the promises and the errors. Read this first.
- `partition`: the writer of one partition. It groups writes, numbers them, finds out whether an unanswered
  write was stored, renews the lease, and refuses a store that has an older state.
- `seen_file`: the file in which a machine records how far a partition had come.
- `memory`, `postgres`, `redis`, and `objects` on a `directory` or `s3`: the engines.
- `queue`: the queue on a partition of any engine, in the layout of docs/store/spool-format.md.
- `disk`: the queue in a local directory.
- `shelf`: the queue in memory, and the file that preserves it over an orderly restart.

`tests/store/keys/test_contract.py` tests every engine.
"""
