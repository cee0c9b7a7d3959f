"""Limits that several workers or machines keep together: who holds how much of them, and who waits."""
