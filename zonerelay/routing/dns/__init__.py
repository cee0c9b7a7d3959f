"""DNS: `resolver.Resolver` is the entry point, and `answers` has the values that it returns.

`resolver` joins equal queries, reads the hosts file, sends queries with `answers`, and detects outages.
`dnspython_reader` reads the answers that are not plain.

Code outside imports `resolver` and `answers`.
"""
