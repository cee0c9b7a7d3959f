"""Rows on their way: claimed, held within a window, read for operators, written when an outcome is known."""
