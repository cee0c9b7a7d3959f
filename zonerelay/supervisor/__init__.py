"""Several workers as one relay: the processes, the listening sockets, reloads, and merged answers for
operators.

`workers` keeps the processes running, `merge` turns the workers' answers into one, `reload` changes the
configuration, `run` is the supervisor's process. The supervisor never holds mail.
"""
