"""The LevelDB engine, the default: one local directory, one synced write for each batch.

`store.open_leveldb` opens a spool. The engine owns the spool's files: `damage` checks them before they are
opened, `spool` opens and watches them, and `keeper` repairs them after a failed write. To read a spool's
records, open `spool.LevelDb` and use the scans in `scan`. `common.records` defines keys and values.
"""
