"""Damage of a LevelDB spool: it is found before LevelDB opens the files, repaired without further loss, and
reported.

`directory` checks the files, `format` parses LevelDB's logs, manifest and tables, and `losses` records losses
until an operator dismisses them. A check or a repair of a spool that is not in use begins with
`directory.lock_directory` and `directory.judge`.
"""
