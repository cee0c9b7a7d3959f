"""Connections to peers: `session` opens and counts them, and `pool` keeps idle ones.

`session_limits` orders hosts and learns what a host accepts on one connection. `client_protocol` is the
asyncio protocol under a session.

Code outside delivery/ imports none of these modules.
"""
