"""Connections to peers: `session` opens them, reads and writes, and `pool` counts and keeps them.

`session_limits` orders hosts and learns what a host accepts on one connection.

Code outside delivery/ imports none of these modules.
"""
