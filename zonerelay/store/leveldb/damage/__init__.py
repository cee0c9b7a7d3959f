"""Damage of a LevelDB spool: found before LevelDB opens the files, mended without further loss, and told.

`directory` judges the files, `format` reads LevelDB's logs and manifest from their bytes, `mending` makes a
log with holes whole, and `losses` keeps what was lost until an operator acknowledges it. A check or a repair
of a spool that no relay has open begins with `directory.lock_directory` and `directory.judge`.
"""
