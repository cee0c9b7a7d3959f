"""Sends mail: chooses how a batch leaves this machine, opens connections to peers and runs transactions.

A batch passes through the sub-packages in this order: `rewrite` makes the message that the zone sends, `auth`
and `source` choose the credential and the source address, `connection` finds or opens a connection (`peer`
opens the socket, `tls` decides what the connection must prove), and `batch` runs the transactions and
collects one outcome for each recipient. `batch.courier.SmtpCourier` is the only entry for the queue.

Each sub-package says which modules are for code outside: the import contracts in pyproject.toml refuse
others.
"""
