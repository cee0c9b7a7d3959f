"""One SMTP session: `session` moves bytes, `commands` answers command lines, `transport` unwraps PROXY, TLS.

`mail`, `ehlo` and `auth` hold the commands; `timeouts` says how long a client may take.

No module is for code outside inbound/.
"""
