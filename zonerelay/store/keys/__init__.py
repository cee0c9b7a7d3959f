"""Ordered maps of bytes with one writer each, and the engines that keep them.

`[spool] backend = "memory"` and `"disk"` are made of it.

- `port`: the types, the promises and the errors. Read this first.
- `partition`: the writer of one partition. It groups writes, numbers them, finds out what became of a write
  without an answer, renews the lease, and refuses a store that holds an older state.
- `seen_file`: the file in which a machine notes how far a partition had come.
- `memory`, `leveldb`, `postgres`, `redis`, and `objects` over `directory` or `s3`: the engines.
- `queue`: the queue over a partition of any engine, in the layout of docs/store/spool-format.md.
- `disk`: the queue in a directory of this machine; `disk_offline` does what commands do to it.
- `shelf`: the queue in memory, and the file in which it survives an orderly restart.

`tests/store/keys/test_contract.py` runs over every engine.
"""
