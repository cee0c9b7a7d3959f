"""Routing: chooses the zone of a recipient (`zones`) and the hosts of a domain (`destinations`).

`dns` resolves names, `mta_sts` keeps the policies of recipient domains, and `addresses` knows private and
own IP addresses, matches addresses against networks and converts domain names.

The header of each sub-package names the modules that code outside may import. The import contracts in
pyproject.toml enforce this.
"""
