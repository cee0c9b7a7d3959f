"""Run whole workers of the relay in a simulated world: is mail lost, repeated or changed?

The code under test is the relay's own, from the listening socket to the outgoing connection. Time,
randomness, DNS, the network, receivers, clients, threads and the disk are simulated by one seeded event
loop, so that a run with the same seed takes the same course.

    python -m tests.simulation --seed 7 --trace

`loop` has time, processes and threads; `network` connections; `disk` the ordered map under the spool;
`receivers` and `clients` the peers; `parts` a worker on all of that; `ledger` what was promised and what must
hold; `scenario` what a seed does; `mutants` faults in the relay that the assertions must find.
"""
