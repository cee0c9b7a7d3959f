"""Stores accepted mail from the commit until its final outcome is stored.

Other packages import five modules. `contract` defines what every store promises, `open` opens the store
that the settings name, `context` defines what that store is given, `spool_paths` locates the spool of
each worker, and `offline` carries out operators' commands without a relay.

`queue/` is the queue, written once over ordered keys. `keys/` defines those keys and writes them. An engine
only keeps keys: `memory`, `leveldb/`, `objects/` (files and S3), `postgres/` and `redis/`; none of the last
three imports another engine. `nodes` lets several relays share a queue. `records` defines keys and values,
and `directories` is for engines with directories of their own.
"""
