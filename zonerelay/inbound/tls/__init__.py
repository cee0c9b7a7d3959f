"""TLS on connections from clients: certificates, contexts and sessions. `channel` and `certificates` use
`ssl`, and `asking` uses pyOpenSSL.

`certificates` and `asking` are imported only if a listener offers TLS, because cryptography, which reads
certificates, and pyOpenSSL use more memory than the rest of a listener.

Code outside inbound/ imports `certificate_files` and `certificates`, to check certificates before a start.
"""
