"""Connections to peers: `session` opens one, `pool` keeps idle ones, `slots` counts them, `host_order` orders
hosts.

`client_protocol` is the asyncio protocol under a session.

No module is for code outside delivery/.
"""
