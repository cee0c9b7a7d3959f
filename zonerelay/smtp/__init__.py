"""SMTP as bytes and values (sans-IO): no asyncio and no sockets."""
