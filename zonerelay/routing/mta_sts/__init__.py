"""MTA-STS policies of recipient domains (RFC 8461): `policies.StsPolicies` is the face.

It keeps policies on disk; `policy_text` parses records and policies.

Code outside takes `policies`.
"""
