"""Who a client is and what it may send: networks, passwords, [[access]] rules, the sender's domain.

No module is for code outside inbound/.
"""
