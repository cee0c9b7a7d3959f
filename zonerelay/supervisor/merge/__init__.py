"""Merges the answers of all workers into those of one relay: status, lists, metrics and readiness."""
