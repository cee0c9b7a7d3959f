"""MTA-STS policies of recipient domains (RFC 8461): `policies.StsPolicies` is the face.

It parses records and policies, and keeps policies on disk.

Code outside takes `policies`.
"""
