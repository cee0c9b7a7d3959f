"""Process-level services: setup, inherited sockets, the service manager, garbage collection, threads, HTTPS,
operators' Python code, and background tasks.
"""
