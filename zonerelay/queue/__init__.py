"""The queue: it decides what is delivered next, and records what became of it.

`scheduler` has the zones, `settle` turns outcomes into writes, `operator` holds the verbs of an operator,
`contract` declares what the queue needs from routing and delivery.

Each sub-package says which modules are for code outside: the import contracts in pyproject.toml refuse
others.
"""
