"""What waits for one destination and what is known of it: its order, suspension, probation and look-ups.

Every module is pure: it reads no clock and awaits nothing.

No module is for code outside queue/.
"""
