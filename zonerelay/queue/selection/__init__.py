"""The choice of the destination that may start next: round robin, rates, and the throttle of a backlog.

No module is for code outside queue/.
"""
