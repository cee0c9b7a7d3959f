"""SMTP as bytes and values (sans-IO): no asyncio, no sockets, nothing here awaits."""
