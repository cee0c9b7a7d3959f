"""The Redis store: a spool on one server, which several relays may share. `open.open_redis` opens it."""
