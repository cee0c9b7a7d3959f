"""The LevelDB engine, the default: one local directory, one synced write for each batch.

`keeper.open_leveldb` opens a spool. The engine owns the spool's files: `damage` checks them before they are
opened, `spool` opens and watches them, and `keeper` repairs them after a failed write. `offline` checks and
repairs a spool without a relay. To read a spool's records, open `spool.LevelDb` and use the reads in `scan`.
"""
