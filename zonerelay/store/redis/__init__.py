"""The Redis store: a spool on one server, which several relays may share.

`open.open_redis` opens it, `open.server_of` says where the server is. `reader` reads messages, bodies and the
queue; `records` decodes deliveries, and `scripts` lists the keys and loads the Lua scripts that decide.
`limits` stores the limits that the relays share. Importing the package imports no driver.
"""
