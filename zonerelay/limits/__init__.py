"""The limits that several workers or machines keep together: connections per zone and site, and turns of
rates.

`values` has what a worker and an authority say to each other, `authority` decides, `worker` keeps one worker
in step with the authority. An authority is reached over a Unix socket (`unix_socket`) or through a store
(`shared`).
"""
