"""The LevelDB engine, the default: one directory of this machine, one synced write for each batch.

`open.open_leveldb` opens it. Owns the spool's files, their judgement before an opening and their repair after
a failed write. `engine` is the only module that knows plyvel.
"""
