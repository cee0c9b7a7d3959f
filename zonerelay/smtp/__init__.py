"""SMTP as bytes and values, without asyncio and sockets (sans-IO)."""
