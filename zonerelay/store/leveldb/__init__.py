"""The LevelDB engine, the default: one directory of this machine, one synced write for each batch.

`store.open_leveldb` opens a spool. The engine owns the spool's files: `damage` judges them before an opening,
`spool` opens and watches them, `keeper` repairs them after a failed write. To read a spool's records, open
`spool.LevelDb` and use the walks in `scan`; `common.records` says how keys and values are spelled.
"""
