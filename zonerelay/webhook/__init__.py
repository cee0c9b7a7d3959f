"""Webhooks: posts the outcomes of mail to HTTP endpoints, at least once (Standard Webhooks).

An event is a small message in the spool, stored in the same write as the outcome that it reports. `webhooks`
creates events, and `courier` posts them. Mail never waits for an endpoint.
"""
