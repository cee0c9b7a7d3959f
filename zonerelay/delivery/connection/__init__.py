"""Connections to peers: `session` opens and counts them, `pool` keeps idle ones, `host_order` orders
hosts.

`session_limits` learns how much a host takes on one connection. `client_protocol` is the asyncio protocol
under a session.

No module is for code outside delivery/.
"""
