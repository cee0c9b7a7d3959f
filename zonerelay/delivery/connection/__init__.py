"""Connections to peers: `session` opens and uses them, and `pool` counts them and keeps idle ones.

`session_limits` orders hosts and learns what a host accepts on one connection.

Code outside delivery/ imports none of these modules.
"""
