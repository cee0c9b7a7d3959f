"""Suspensions and hold rules of operators (called orders in the code), which apply to queued and to new mail.

Code outside imports `order` (one order, and what the active orders say about mail; pure) and `orders` (the
orders of the relay, stored in a file).
"""
