"""Observability: log lines and counters of mail events, metrics, and redaction.

`events` has one method per event, which writes a log line and moves the counters of `metrics`; `logs` writes
the lines and redacts addresses.
"""
