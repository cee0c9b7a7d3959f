"""Sends mail: selects the source address of a batch, opens connections to peers and runs transactions.

A batch passes through the sub-packages in this order: `rewrite` creates the message that the zone sends,
`auth` and `source` choose the credential and the source address, `connection` finds or opens a connection
(`peer` opens the socket, `tls` decides what the connection must prove), and `batch` runs the transactions and
collects one outcome for each recipient. `batch.courier.SmtpCourier` is the only entry point for the queue.

The header of each sub-package names the modules that code outside may import. The import contracts in
pyproject.toml enforce this.
"""
