"""TLS towards clients. `ports` has the values and Protocols; other modules here import OpenSSL or
cryptography.

The libraries are imported only when a listener offers TLS: they cost more memory than the rest of a listener.

Code outside takes `certificate_files` and `certificates`, to check certificates before a start.
"""
