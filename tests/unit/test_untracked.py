"""What there are tens of thousands of is nothing to the garbage collector, which holds the loop meanwhile."""

from __future__ import annotations

import gc

from zonerelay.config.settings import RetrySettings
from zonerelay.queue.destination.destinations import Destination, Site
from zonerelay.routing.destinations.route import DestinationLimits, MxHost, Route
from zonerelay.routing.dns.answers import DnsAnswer, DnsStatus, MxRecord, TlsaRecord


def test_cached_dns_answers_are_nothing_to_the_garbage_collector() -> None:
    mail = DnsAnswer(DnsStatus.OK, tuple(MxRecord(10, name) for name in ("a.example", "b.example")), 1.0)
    text = DnsAnswer(DnsStatus.OK, ("v=STSv1; id=1",), 1.0)
    pinned = DnsAnswer(DnsStatus.OK, (TlsaRecord(3, 1, 1, b"x"),), 1.0)
    cache = {("a", "MX"): mail, ("a", "TXT"): text, ("a", "TLSA"): pinned}
    gc.collect()
    for thing in (mail, mail.records, mail.records[0], text, text.records, pinned, pinned.records, cache):
        assert not gc.is_tracked(thing)


def test_hosts_and_limits_of_destinations_are_nothing_to_the_garbage_collector() -> None:
    hosts = (MxHost("mx.example.com", 25),)
    limits = DestinationLimits(10, 50, 100)
    gc.collect()
    for thing in (hosts, hosts[0], limits):
        assert not gc.is_tracked(thing)


def test_routes_and_what_destinations_remember_are_nothing_to_the_garbage_collector() -> None:
    route = Route("default", "example.com", (MxHost("mx.example.com", 25),), 1.0)
    destination = Destination(route, Site(route.site), RetrySettings())
    destination.domains["example.com"] = None
    gc.collect()
    for thing in (route, destination.suspension, destination.domains):
        assert not gc.is_tracked(thing)
