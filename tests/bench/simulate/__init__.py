"""The queue in virtual time: the relay's own scheduling code, no sockets, days in minutes."""
