"""Which zone, which next hop, which hosts."""
