"""The queue: decides which delivery is attempted next, and records the outcomes.

`scheduler` manages the zones, `settle` turns outcomes into writes, and `operator` implements the commands of
an operator. Routing and delivery are two functions of `zone.zone.ZoneParts`.

The header of each sub-package names the modules that code outside may import. The import contracts in
pyproject.toml enforce this.
"""
