"""Services of a process: setup, sockets, the service manager, garbage collection, threads, HTTPS, operators'
Python code, and tasks.
"""
