"""Domains are looked up in the order of their mail: urgent, then fresh and put-off mail by turns."""

from __future__ import annotations

import pytest

from tests.support.queueing import delivery
from zonerelay.model.queue_name import Priority, queue_of
from zonerelay.queue.destination.destinations import AGAIN_AT_ONCE, AT_ONCE, RouteLookups, UnroutedMail


def line(domain: str, *, due: float = 0.0, priority: Priority = Priority.NORMAL) -> UnroutedMail:
    made = UnroutedMail(domain)
    more(made, due=due, priority=priority)
    return made


def more(to: UnroutedMail, *, due: float = 0.0, priority: Priority = Priority.NORMAL) -> None:
    (domain,) = to.domains
    to.add(delivery(f"u@{domain}", next_attempt=due, queue=queue_of("default", priority)), priority)


def all_of(look_ups: RouteLookups) -> list[str]:
    found: list[str] = []
    while some := look_ups.take():
        found += some
        for domain in some:
            look_ups.ended(domain, found=True)
    return found


def test_fresh_mail_does_not_wait_behind_a_list() -> None:
    look_ups = RouteLookups()
    for n in range(500):
        look_ups.want(line(f"d{n}.example", due=1.0))
    look_ups.want(line("single.example"))
    assert "single.example" in look_ups.take()[:2]


def test_a_domain_that_waits_is_hastened_and_asked_once() -> None:
    look_ups = RouteLookups()
    lines = [line(f"d{n}.example", due=1.0) for n in range(100)]
    for each in lines:
        look_ups.want(each)
    more(lines[98])
    look_ups.want(lines[98])
    more(lines[99], priority=Priority.HIGH)
    look_ups.want(lines[99])
    found = all_of(look_ups)
    assert found[0] == "d99.example"
    assert "d98.example" in found[:3]
    assert len(found) == len(set(found)) == 100
    more(lines[5])
    look_ups.want(lines[5])
    assert not look_ups.take()


def test_domains_without_a_route_do_not_keep_the_places_of_others() -> None:
    """As the simulation showed: hundreds of dead name servers, asked again for each delivery."""
    look_ups = RouteLookups()
    names = [f"dead{n}.example" for n in range(2 * AT_ONCE)]
    for name in names:
        look_ups.want(line(name))
    for name in [*look_ups.take(), *names[AT_ONCE:]]:
        look_ups.take()
        look_ups.ended(name, found=False)
    for name in names:
        look_ups.want(line(name, due=1.0))
        look_ups.want(line(f"alive-{name}"))
    under_way = look_ups.take()
    assert len(under_way) == AT_ONCE
    again = [name for name in under_way if name in names]
    assert again == names[:AGAIN_AT_ONCE]
    look_ups.ended(again[0], found=True)
    assert look_ups.take() == [names[AGAIN_AT_ONCE]], "they take turns"
    for name in look_ups._again_under_way.copy():
        look_ups.ended(name, found=True)
    look_ups.want(line(again[0]))
    assert not [each for each in look_ups._again if again[0] in each.domains], "it had a route"


def test_no_more_of_them_are_remembered_than_was_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zonerelay.queue.destination.destinations.KNOWN", 2)
    look_ups = RouteLookups()
    for name in ("a.example", "b.example", "c.example"):
        look_ups.want(line(name))
        look_ups.take()
        look_ups.ended(name, found=False)
    assert list(look_ups._failed) == ["b.example", "c.example"]
