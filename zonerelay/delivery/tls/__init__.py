"""TLS to peers: `plan` decides what a connection must prove, and checks it after the handshake.

It also has the TLS contexts and remembers hosts with broken TLS. `dane` and `chains` check certificates.
`chains` is imported only if DANE needs it.

Code outside imports `plan`, to explain a message.
"""
