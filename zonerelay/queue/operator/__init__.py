"""Operators' commands on the queue: `operations` lists, counts and changes mail, and `filters` selects it.

Code outside imports `operations`; `journal`, which stores what an undo restores; `bin`, which keeps dropped
mail for a day; and `clock_watch`, which corrects due times after the clock was set.
"""
