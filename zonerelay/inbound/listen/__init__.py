"""Listening sockets: `listeners` owns all listeners of a worker, `listener` is an SMTP listener with its
sessions, and `http_listener` is an HTTP listener with its connections.

`listening_socket` binds the sockets of both, explains why an address cannot be used, and accepts clients that
wait at the socket of another worker. `submit_socket` accepts mail from another process.

Code outside inbound/ imports `listeners`, `http_listener` for the interface to the HTTP server,
`listening_socket`, with which the supervisor binds for all workers, and `submit_socket`, with which it
submits mail.
"""
