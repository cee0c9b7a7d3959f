"""What the commands of a session share, without I/O: the listener's context, the client, the transaction.

`replies` holds every reply of the server, `questions` what has to be asked before a reply.

Code outside takes `rewriting`, `zone_header` and `context`, to explain a message.
"""
