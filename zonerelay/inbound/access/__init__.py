"""Who a client is and what it may send: networks, passwords, [[access]] rules, the sender's domain.

Code outside takes `guard`, which explains the guard rails of a user.
"""
