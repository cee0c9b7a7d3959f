"""Listening sockets: `listeners` owns those of a worker; `listener` is one for SMTP with its sessions,
`http_listener` one for HTTP with its connections.

`listening_socket` opens the socket of either; `binding` makes sockets and says in words why an address cannot
be used; `sibling_sockets` accepts clients that wait at the socket of another worker. `submit_socket` takes
mail from another process.

Code outside takes `listeners`, `http_connection` for the seam to the HTTP server, `binding`, with which the
supervisor binds for all workers, and `submit_socket`, with which it submits mail.
"""
