"""Webhooks: what becomes of mail is asked to HTTP endpoints, at least once (Standard Webhooks).

An event is a small message in the spool, in the same write as the outcome that it tells; `webhooks` makes
events, `courier` posts them. Mail never waits for an endpoint.
"""
