"""Finds damage of a LevelDB spool before LevelDB opens the files, repairs it without further loss, and
reports it.

`directory` checks the files, `format` parses LevelDB's logs, manifest and tables, and `losses` records losses
until an operator dismisses them. A check or a repair of a spool that is not in use begins with
`directory.lock_directory` and `directory.judge`.
"""
