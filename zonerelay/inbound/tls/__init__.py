"""TLS with clients. `ports` has the values and Protocols; the other modules import OpenSSL or cryptography.

These libraries are imported only if a listener offers TLS, because they use more memory than the rest of a
listener.

Code outside inbound/ imports `certificate_files` and `certificates`, to check certificates before a start.
"""
