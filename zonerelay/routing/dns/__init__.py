"""DNS: `resolver.Resolver` is the entry point, and `answers` has the values that it returns.

`name_servers` sends queries over UDP with `packets`. `dnspython_client` handles the queries and answers that
are not plain. `resolver` joins equal queries and reads the hosts file, and `name_servers` detects outages.

Code outside imports `resolver` and `answers`.
"""
