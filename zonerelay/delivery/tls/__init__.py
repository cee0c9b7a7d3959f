"""TLS on outgoing connections: `plan` determines the TLS requirements, and verifies the server.

It also has the TLS contexts and remembers hosts with broken TLS. `dane` and `chains` check certificates.
`chains` is imported only if DANE needs it.

Code outside imports `plan`, to explain a message.
"""
