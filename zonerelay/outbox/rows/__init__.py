"""The rows that this relay processes: claimed, limited by a window, composed into messages, read for
operators, and written when an outcome is known.
"""
