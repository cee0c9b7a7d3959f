"""The queue: decides which delivery is attempted next, and records the outcomes.

`scheduler` manages the zones, `settle` turns outcomes into writes, `operator` implements the commands of an
operator, and `contract` declares what the queue needs from routing and delivery.

The header of each sub-package names the modules that code outside may import. The import contracts in
pyproject.toml enforce this.
"""
