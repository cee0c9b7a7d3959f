"""TLS towards clients. `ports` has the values and Protocols; every other module here imports OpenSSL.

The library is imported only when a listener offers TLS: it costs more memory than the rest of a listener.
"""
