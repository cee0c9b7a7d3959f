"""Routing: the zone of a recipient (`zones`), the hosts of a domain (`destinations`), and what both ask.

`dns` resolves names, `mta_sts` keeps policies of recipient domains, `idna` converts domain names,
`addresses` knows private and own IP addresses, and matches addresses against networks.

Each sub-package says which modules are for code outside: the import contracts in pyproject.toml refuse
others.
"""
