"""Suspensions and hold rules of operators (orders): mail that waits until they end, now and when it arrives.

Code outside imports `order` (one order, and what the active orders say about mail; pure) and `orders` (the
orders of the relay, stored in a file).
"""
