"""Process-level services: setup, inherited sockets, the service manager, garbage collection, threads, HTTPS,
code of the operator, and background tasks.
"""
