"""The verbs of an operator: `operations` lists and changes the queue; `filters` selects, `summary` shows.

Code outside takes `operations`; `journal`, which has what an undo restores; `reroute`; and `clock_watch`,
which corrects due times after the clock was set.
"""
