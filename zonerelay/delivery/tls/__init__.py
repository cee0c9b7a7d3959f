"""TLS towards peers: `plan` decides what a connection must prove, `verify` checks it after the handshake.

`policy` has the TLS contexts and remembers hosts with broken TLS. `dane` and `chains` judge certificates;
`chains` is imported only when DANE needs it.

Code outside takes `plan`, to explain a message.
"""
