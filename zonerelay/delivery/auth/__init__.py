"""Logs in at next hops (smarthosts). `logins` is the entry point.

`accounts` decides whether a credential may be tried, reads secrets and stores refresh tokens. `oauth` fetches
access tokens.

Code outside imports `logins`.
"""
