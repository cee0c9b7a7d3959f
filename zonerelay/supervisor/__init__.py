"""Runs several workers as one relay: their processes, listening sockets, reloads, and merged answers to
operators.

`workers` keeps the processes running, `merge` combines the workers' answers into one, `reload` changes the
configuration, and `run` is the supervisor's process. The supervisor never holds mail.
"""
