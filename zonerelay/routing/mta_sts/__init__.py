"""MTA-STS policies of recipient domains (RFC 8461): `policies.StsPolicies` is the face.

`policy_text` parses records and policies, `files` keeps policies on disk.

Code outside takes `policies`, and `files` to build them with.
"""
