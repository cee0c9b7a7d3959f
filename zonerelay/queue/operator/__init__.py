"""The verbs of an operator: `operations` lists and changes the queue; `filters` selects, `trace` shows."""
