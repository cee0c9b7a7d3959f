"""Process-level services: setup, inherited sockets, the service manager, garbage collection, threads, HTTPS,
and background tasks.
"""
