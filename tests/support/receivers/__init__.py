"""Large receivers as they are, on loopback addresses: a process that plays all of them, strictly."""
