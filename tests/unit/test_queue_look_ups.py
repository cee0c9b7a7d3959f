"""Domains are looked up in the order of their mail: urgent, then fresh and put-off mail by turns."""

from __future__ import annotations

from tests.support.queueing import delivery
from zonerelay.model.priority import Priority, queue_of
from zonerelay.queue.destinations import Unrouted
from zonerelay.queue.look_ups import AT_ONCE, LookUps


def line(domain: str, *, due: float = 0.0, priority: Priority = Priority.NORMAL) -> Unrouted:
    made = Unrouted(domain)
    more(made, due=due, priority=priority)
    return made


def more(to: Unrouted, *, due: float = 0.0, priority: Priority = Priority.NORMAL) -> None:
    (domain,) = to.domains
    to.add(delivery(f"u@{domain}", next_attempt=due, queue=queue_of("default", priority)), priority)


def all_of(look_ups: LookUps) -> list[str]:
    found: list[str] = []
    while some := look_ups.take():
        found += some
        for _ in some:
            look_ups.ended()
    return found


def test_so_many_at_once() -> None:
    look_ups = LookUps()
    for n in range(AT_ONCE + 5):
        look_ups.want(line(f"d{n}.example"))
    assert len(look_ups.take()) == AT_ONCE
    assert look_ups.take() == []
    look_ups.ended()
    assert look_ups.take() == [f"d{AT_ONCE}.example"]
    assert look_ups.is_under_way
    assert look_ups.is_wanted


def test_fresh_mail_does_not_wait_behind_a_list() -> None:
    look_ups = LookUps()
    for n in range(500):
        look_ups.want(line(f"d{n}.example", due=1.0))
    look_ups.want(line("single.example"))
    assert "single.example" in look_ups.take()[:2]


def test_a_domain_that_waits_is_hastened_and_asked_once() -> None:
    look_ups = LookUps()
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
