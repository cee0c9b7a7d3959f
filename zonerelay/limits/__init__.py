"""Enforces limits that several workers or machines share: connections per zone and destination, and rates.

`authority` defines the messages between a worker and the authority, and decides. `worker` keeps one worker in
step with it. The authority is reached over a Unix socket (`unix_socket`) or through a store (`shared`).
"""
