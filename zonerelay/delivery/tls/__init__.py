"""TLS to peers: `plan` decides what a connection must prove, and `verify` checks it after the handshake.

`plan` also has the TLS contexts and remembers hosts with broken TLS. `dane` and `chains` check certificates.
`chains` is imported only if DANE needs it.

Code outside imports `plan`, to explain a message.
"""
