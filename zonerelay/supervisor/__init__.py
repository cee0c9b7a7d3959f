"""Several workers made one relay: processes, sockets, metrics, operators' questions."""
