"""DNS: `resolver.Resolver` is the face, `answers` has the values that it returns.

`name_servers` asks over UDP with `packets`; `dnspython_client` takes the questions and answers
that these leave. `resolver` joins equal questions and reads the hosts file, `name_servers` notices outages.

Code outside takes `resolver` and `answers`.
"""
