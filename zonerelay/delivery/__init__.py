"""Sending mail: connections to peers and the transactions on them."""
