"""Taking mail: the listener, its sessions, and the intake of one message."""
