"""DNS lookups: `resolver.Resolver` performs them, and `answers` defines the results.

`resolver` joins equal queries, reads the hosts file, sends queries with `answers`, and detects outages.
`dnspython_reader` reads the answers that are not plain.

Code outside imports `resolver` and `answers`.
"""
