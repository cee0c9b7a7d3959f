"""Orders of operators: which mail waits until they are over, now and when it comes.

For code outside: `order` (an order, and what several say about mail, pure) and `orders` (those of the relay,
kept in a file).
"""
