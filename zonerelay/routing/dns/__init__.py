"""DNS: `resolver.Resolver` is the face, `answers` has the values that it returns.

`name_servers` asks over UDP with `packets` and `records`; `dnspython_client` takes the questions and answers
that these leave. `cache` joins equal questions, `hosts` reads the hosts file, `name_server_watch` notices
outages.

Code outside takes `resolver` and `answers`.
"""
