"""Builds and rewrites messages as streams of bytes: no sockets, no store.

`header` reads and changes header sections, `dkim` signs, `dsn` makes reports, `compose` makes messages from
their parts, `srs` rewrites senders.

Each sub-package says which modules are for code outside: the import contracts in pyproject.toml refuse
others.
"""
