"""Answers of all workers, merged into those of one relay: status, lists, metrics, readiness."""
