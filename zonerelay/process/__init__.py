"""The process around the relay: setup, inherited sockets, the service manager, garbage collection, threads,
HTTPS, and the tasks that an object owns.
"""
