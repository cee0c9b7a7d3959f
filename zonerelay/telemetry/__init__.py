"""Observability: log lines, counters of mail events, metrics, and the redaction of personal data.

`events` has one method per event, which writes a log line and moves the counters of `metrics`; `logs` writes
the lines and redacts addresses.
"""
