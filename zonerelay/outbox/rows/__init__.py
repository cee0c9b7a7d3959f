"""Rows on their way: claimed, held within a window, made messages, read for operators, written when an
outcome is known.
"""
