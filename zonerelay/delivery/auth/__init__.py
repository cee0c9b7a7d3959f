"""Log-ins at next hops (smarthosts): `logins` is the face.

`accounts` decides whether a credential may be tried, `oauth` fetches access tokens (`oauth_grants` has the
protocol as values), `secret_files` reads secrets and keeps refresh tokens.

Code outside takes `logins`.
"""
