"""A suspended destination with any number of deliveries: what it may cost the others."""

from __future__ import annotations

import itertools

from tests.support.queueing import NO_HOST, delivery, plan_claim
from zonerelay.config.settings import RetrySettings, ZoneSettings
from zonerelay.model.delivery import Delivery
from zonerelay.model.queue_name import Priority
from zonerelay.queue.destination.destinations import PUT_OFF_RATE, Destination, Suspension
from zonerelay.queue.zone.plan import MANY_PUT_OFF, ZonePlan
from zonerelay.queue.zone.window import ClaimRequest
from zonerelay.routing.destinations.route import MxHost, Route

NOW = 1_700_000_000.0
DEAD = "dead.example"
RETRY = RetrySettings(suspend_min=30.0, suspend_max=30.0)


def mail(count: int, *, first: int = 0) -> list[Delivery]:
    return [delivery(f"u@{DEAD}", message_id=f"{number:016x}") for number in range(first, first + count)]


def suspended(more: int = 0) -> tuple[ZonePlan, Destination]:
    """A queue whose one destination has just been found dead, with `more` deliveries waiting for it."""
    queue = ZonePlan(ZoneSettings(), RETRY, window=4000)
    queue.add(mail(1 + more), NOW)
    (domain,) = queue.look_ups.take()
    queue.found(domain, Route("default", domain, (MxHost("mx.dead.example", 25),), NOW + 3600), NOW)
    work = queue.next_work(NOW)
    assert work is not None
    queue.finished(work, [NO_HOST], NOW)
    return queue, work.destination


def test_a_suspended_destination_with_much_mail_is_passed_over_until_it_has_rested() -> None:
    queue, destination = suspended(MANY_PUT_OFF)
    ((_, parked),) = queue.take_parked()
    assert len(parked) == MANY_PUT_OFF
    # Claims leave its mail where it is, and nothing is fetched by name.
    plan = plan_claim(queue, {Priority.NORMAL})
    assert isinstance(plan, ClaimRequest)
    assert plan.skip == {DEAD}
    assert plan_claim(queue) is None
    queue.rested(destination)
    refill = plan_claim(queue)
    assert refill is not None
    assert refill.domain is not None
    assert refill.limit <= 4000 // 8
    queue.add(mail(refill.limit, first=1000), NOW + 1)
    queue.claimed(refill, refill.limit)
    # A portion at a time: the next one after the next rest.
    assert [len(put_off) for _, put_off in queue.take_parked()] == [refill.limit]
    assert plan_claim(queue) is None
    assert queue.waiting == 0


def test_the_mail_of_a_few_messages_is_put_off_without_more_ado() -> None:
    queue, _ = suspended(3)
    assert [len(parked) for _, parked in queue.take_parked()] == [3]
    plan = plan_claim(queue, {Priority.NORMAL})
    assert isinstance(plan, ClaimRequest)
    assert not plan.skip


def test_what_is_put_off_comes_back_one_after_the_other() -> None:
    queue, destination = suspended()
    del queue
    suspension: Suspension = destination.suspension
    places = [suspension.place() for _ in range(1000)]
    assert places[0] > suspension.until
    gaps = {round(later - earlier, 4) for earlier, later in itertools.pairwise(places)}
    assert gaps == {1 / PUT_OFF_RATE}


def test_a_suspension_does_not_last_an_hour_longer_when_the_clock_is_set_back_by_an_hour() -> None:
    """The simulation, seed 324: mail for a host that answered again waited for as long as the step was."""
    _, destination = suspended()
    suspension: Suspension = destination.suspension
    suspension.place()
    earlier = NOW - 3600
    assert not suspension.is_suspended(earlier)
    assert suspension.limit(20, earlier) == 1
    suspension.failed(suspension.epoch, NO_HOST.reply, 0, earlier)
    assert suspension.is_suspended(earlier + 1)
    assert suspension.place() < suspension.until + 1
    assert suspension.until < NOW


def test_another_domain_of_the_same_hosts_does_not_end_the_rest() -> None:
    queue, destination = suspended(MANY_PUT_OFF)
    queue.take_parked()
    queue.add([delivery("u@other.example", message_id="f" * 16)], NOW)
    (domain,) = queue.look_ups.take()
    queue.found(domain, Route("default", domain, (MxHost("mx.dead.example", 25),), NOW + 3600), NOW)
    assert set(destination.domains) == {DEAD, "other.example"}
    assert plan_claim(queue) is None
