"""Connections to peers: `session` opens one, `pool` keeps idle ones, `slots` counts them, `host_order` orders
hosts.

`session_limits` learns how much a host takes on one connection. `client_protocol` is the asyncio protocol
under a session.

No module is for code outside delivery/.
"""
