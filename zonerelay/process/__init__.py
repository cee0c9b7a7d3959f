"""The process around the relay: setup, inherited sockets, the service manager, garbage collection, HTTPS, and
the tasks that an object owns.
"""
