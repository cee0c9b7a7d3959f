"""Hosts that say nothing do not hold all of a zone's connections."""

from collections import Counter
from typing import Any

import pytest
from msgspec import structs

from tests.support.plans import RETRY, PlanBed
from tests.support.queueing import BOUNCED, DEFERRED, DELIVERED, LOCAL, NO_HOST
from zonerelay.config.settings import ZoneSettings
from zonerelay.limits.authority import SlotGrant
from zonerelay.limits.worker import ZoneAllowance
from zonerelay.model.delivery import DeliveryKey, queue_of
from zonerelay.model.envelope import Mailbox, MessageId
from zonerelay.model.reply import Outcome, Reply, Scope
from zonerelay.queue.destination.destinations import LONG, Work
from zonerelay.queue.zone.plan import ZonePlan

IN_DOUBT = structs.replace(
    DEFERRED, reply=Reply(451, "4.2", "timed out"), scope=Scope.MESSAGE, local=True, in_doubt=True
)
NO_TLS = structs.replace(DEFERRED, reply=Reply(451, "7.30", "no STARTTLS"), scope=Scope.MESSAGE, local=True)


class Plan(PlanBed):
    """20 connections, 10 to one destination."""

    def __init__(self, **zone: Any) -> None:
        super().__init__(**{"max_connections": 20, **zone})

    def add(self, domain: str, count: int = 30, **more: Any) -> None:
        super().add(domain, count, **more)

    def active(self) -> Counter[str]:
        """How many are active where, once no more start."""
        self.start()
        return Counter(map(_name, self.works))

    def fail(self, name: str) -> None:
        """All that is active there finds no host."""
        for _ in range(sum(_name(work) == name for work in self.works)):
            self.finish(name, NO_HOST)


def _name(work: Work) -> str:
    return work.deliveries[0].domain


@pytest.fixture
def plan() -> Plan:
    return Plan()


def test_many_silent_hosts_leave_three_eighths_to_those_that_answer(plan: Plan) -> None:
    plan.add("good")
    plan.active()
    plan.finish("good")
    for n in range(25):
        plan.add(f"silent{n}")
    active = plan.active()
    assert active["good"] == 8
    assert active.total() == 20
    for _ in range(15):
        plan.finish("good")
        plan.active()
    assert plan.active()["good"] == 8
    assert plan.active().total() == 20


def test_hosts_that_have_failed_make_way_while_new_ones_wait(plan: Plan) -> None:
    """As ten million simulated deliveries showed: thousands of domains died together, and what was tried
    again for them held the connections that each host needs which has not been heard of.
    """
    for n in range(25):
        plan.add(f"dead{n}", 3)
    while any(name.startswith("dead") for name in plan.active()):
        plan.fail(_name(plan.works[0]))
    plan.queue.take_parked()
    plan.now += 31
    for n in range(25):
        plan.add(f"dead{n}", 3)
    assert plan.active().total() == 5
    for n in range(20):
        plan.add(f"new{n}")
    for _ in range(4):
        plan.fail(next(_name(work) for work in plan.works if _name(work).startswith("dead")))
        plan.active()
    active = plan.active()
    assert sum(count for name, count in active.items() if name.startswith("dead")) == 2
    assert sum(count for name, count in active.items() if name.startswith("new")) == 12


def test_whoever_finds_no_room_gets_the_next_that_is_given_back(plan: Plan) -> None:
    for n in range(13):
        plan.add(f"silent{n}")
        plan.active()
    plan.add("good", 1)
    assert plan.active() == {f"silent{n}": 1 for n in range(12)}
    plan.fail("silent3")
    plan.fail("silent4")
    left = (0, 1, 2, *range(5, 13))
    assert plan.active() == {**{f"silent{n}": 1 for n in left}, "good": 1}


@pytest.mark.parametrize("outcome", [DELIVERED, DEFERRED, BOUNCED, NO_TLS])
def test_any_answer_ends_the_probation(outcome: Outcome, plan: Plan) -> None:
    plan.add("a")
    assert plan.active() == {"a": 1}
    plan.finish("a", outcome)
    assert plan.active() == {"a": 10}


@pytest.mark.parametrize("outcome", [LOCAL, NO_HOST, IN_DOUBT])
def test_no_answer_does_not(outcome: Outcome, plan: Plan) -> None:
    plan.add("a")
    plan.active()
    plan.finish("a", outcome)
    assert plan.active()["a"] <= 1


def test_one_that_had_to_wait_and_then_answers_waits_no_longer(plan: Plan) -> None:
    plan.add("good")
    plan.active()
    for n in range(12):
        plan.add(f"silent{n}")
        plan.active()
    assert plan.active() == {"good": 1, **{f"silent{n}": 1 for n in range(11)}}
    plan.finish("good")
    active = plan.active()
    assert active["good"] == 8
    assert active["silent11"] == 1


def test_suspension_puts_back_on_probation(plan: Plan) -> None:
    plan.add("a", 100)
    plan.active()
    plan.finish("a")
    assert plan.active() == {"a": 10}
    plan.fail("a")
    plan.queue.take_parked()
    plan.now += 31
    plan.add("a")
    assert plan.active() == {"a": 1}
    plan.finish("a")
    assert plan.active() == {"a": 10}


def test_a_host_that_takes_messages_and_does_not_say_so_is_on_probation_again(plan: Plan) -> None:
    plan.add("mute", 100)
    plan.active()
    plan.finish("mute")
    assert plan.active() == {"mute": 10}
    for _ in range(9):
        plan.finish("mute", IN_DOUBT)
        plan.active()
    assert plan.active() == {"mute": 1}
    plan.finish("mute")
    assert plan.active() == {"mute": 10}


def test_a_next_hop_is_on_no_probation() -> None:
    plan = Plan(next_hop="hop")
    plan.add("a")
    assert plan.active() == {"a": 10}


def test_a_zone_of_one_connection_works() -> None:
    plan = Plan(max_connections=1, max_connections_per_destination=1)
    for n in range(4):
        plan.add(f"d{n}", 2)
    served = []
    while plan.active():
        served.append(_name(plan.works[0]))
        plan.finish(served[-1], NO_HOST if len(served) == 1 else DELIVERED)
    assert Counter(served) == {"d0": 1, "d1": 2, "d2": 2, "d3": 2}


def test_hosts_that_answer_after_minutes_have_half_and_new_ones_find_room_beside_them(plan: Plan) -> None:
    """As the simulation showed: tarpits that had taken a message held every connection."""
    plan.add("good", 1)
    plan.active()
    plan.finish("good")
    for n in range(10):
        plan.add(f"tarpit{n}")
    for _ in range(3):
        plan.active()
        for work in list(plan.works):
            plan.finish(_name(work), seconds=120.0)
    assert plan.active().total() == 10
    for n in range(8):
        plan.add(f"new{n}")
    active = plan.active()
    assert sum(active[f"new{n}"] for n in range(8)) == 5
    plan.add("good")
    assert plan.active()["good"] == 5


def test_a_slow_one_that_becomes_quick_is_free_again(plan: Plan) -> None:
    plan.add("moody")
    plan.active()
    plan.finish("moody", seconds=60.0)
    assert plan.active()["moody"] == 10
    plan.add("other")
    assert plan.active()["other"] == 1
    for _ in range(3):
        plan.finish("moody", seconds=0.5)
        plan.active()
    assert plan.active()["moody"] == 10


def test_what_is_known_of_a_destination_outlives_its_place_in_memory(plan: Plan) -> None:
    """A zone with more destinations than are kept met each of them anew, behind all silent ones."""
    plan.add("good", 1)
    plan.active()
    plan.finish("good")
    plan.queue._forget_some(plan.now)
    assert not plan.queue._destinations
    for n in range(13):
        plan.add(f"silent{n}")
        plan.active()
    plan.add("good", 12)
    assert plan.active()["good"] == 8


def test_no_more_is_remembered_than_was_promised(plan: Plan) -> None:
    plan.queue.round_robin._slow_start._past.limit = 2
    for name in ("a", "b", "c"):
        plan.add(name, 1)
        plan.active()
        plan.finish(name)
    plan.queue._forget_some(plan.now)
    for name in ("a", "c"):
        plan.add(name)
    assert plan.active() == {"a": 1, "c": 10}


def test_thousands_of_domains_that_died_together_do_not_fill_the_window(plan: Plan) -> None:
    """As the simulation showed: all of the window waited for probes, and nothing else came in."""
    plan.queue = ZonePlan(ZoneSettings(max_connections=20), RETRY, window=1000)
    names = [f"dead{n}" for n in range(100)]
    for name in names:
        plan.add(name, 1)
    while plan.active():
        plan.fail(_name(plan.works[0]))
    plan.queue.take_parked()
    plan.now += 31
    for name in names:
        plan.add(name, 9)
    parked = plan.queue.take_parked()
    assert plan.active() == {f"dead{n}": 1 for n in range(5)}
    assert 500 <= plan.queue.window.waiting < 550
    assert len(parked) * 9 + plan.queue.window.waiting + 5 == 900
    assert all(destination.suspension.until == plan.now + 30 for destination, _ in parked)
    while plan.active():
        plan.finish(_name(plan.works[0]))
    assert not plan.queue.window.waiting, "those that waited have had their turn"
    plan.now += 31
    plan.add("dead99", 9)
    assert plan.active()["dead99"] == 1, "and the others have it when there is room"


def key_of(number: int, domain: str) -> DeliveryKey:
    return DeliveryKey(queue_of("default"), MessageId(f"{number:016x}"), Mailbox(f"u0@{domain}"))


class Sharing(Plan):
    """A worker that is given its connections."""

    def __init__(self, **zone: Any) -> None:
        self.allowance = ZoneAllowance("default", lambda: None, lambda: 0.0)
        super().__init__(driver={"shared": self.allowance}, **zone)

    @property
    def wished(self) -> int:
        return self.allowance.figures[2]

    def give(self, name: str, count: int = 1) -> None:
        """So many connections in all."""
        site = self.route(name)
        self.allowance.apply((SlotGrant(site.site, site.destination, count),), 0, 0.0)
        self.queue.round_robin.granted(self.now)


def test_who_waits_for_a_connection_of_its_worker_counts_as_if_it_had_one() -> None:
    """Seen in simulated workers: connections came for thousands of hosts that might not use them."""
    plan = Sharing()
    for n in range(20):
        plan.add(f"new{n}", 1)
    assert not plan.active()
    assert plan.wished == 12
    plan.give("new3")
    assert plan.active() == {"new3": 1}
    assert plan.wished == 11, "and its place is taken by nobody else"
    plan.finish("new3")
    plan.active()
    assert plan.wished == 12


def test_who_needs_no_connection_any_more_makes_room() -> None:
    plan = Sharing()
    for n in range(20):
        plan.add(f"new{n}", 1)
    plan.active()
    plan.queue.withdraw([key_of(n + 1, f"new{n}") for n in range(5)])
    plan.queue.round_robin.granted(plan.now)
    plan.active()
    for n in range(12, 17):
        plan.give(f"new{n}")
        assert plan.active()[f"new{n}"] == 1


def test_a_queue_of_replaced_settings_that_ends_takes_no_wish_from_its_successor() -> None:
    plan = Sharing()
    plan.add("a", 1)
    plan.active()
    plan.give("a")
    plan.active()
    plan.finish("a")
    plan.add("b", 1)
    plan.active()
    assert plan.wished == 1
    old = plan.queue
    list(old.drain())
    assert not plan.wished, "what the old one waited for is not needed"
    plan.queue = ZonePlan(ZoneSettings(max_connections=20), RETRY, shared=plan.allowance)
    plan.add("a", 2)
    plan.add("b", 1)
    plan.active()
    wished = plan.wished
    assert wished > 0
    list(old.clear())
    assert plan.wished == wished


def test_each_of_two_workers_goes_by_half_of_the_connections() -> None:
    plan = Sharing()
    plan.allowance.owners = 2
    plan.queue.round_robin.granted(plan.now)
    for n in range(20):
        plan.add(f"new{n}", 1)
    assert not plan.active()
    assert plan.wished == 6


def test_one_that_waits_for_room_is_not_kept_out_by_its_own_wish() -> None:
    """Seen in simulated workers (seed 95): a destination that had become slow waited for room among the slow
    ones, and its wish for a connection, made later, took the only place. Its mail stayed until it expired.
    """
    plan = Sharing(max_connections=6)
    plan.allowance.owners = 2  # one connection for slow destinations
    plan.queue.round_robin.granted(plan.now)
    plan.add("s", 2)
    plan.active()
    plan.give("s")
    plan.active()
    plan.finish("s", seconds=LONG + 1)
    assert plan.active() == {"s": 1}
    plan.add("d", 5)
    plan.active()
    plan.give("d")
    plan.active()
    plan.finish("d")
    assert plan.active() == {"s": 1, "d": 1}
    plan.finish("d", seconds=LONG + 1)
    assert plan.active() == {"s": 1}
    plan.give("d", 0)
    plan.finish("s")
    plan.give("d")
    assert plan.active() == {"d": 1}


@pytest.mark.parametrize("each", [1, 5, 50])
def test_a_good_host_goes_at_once_beside_sixty_dead_ones(each: int) -> None:
    """With 20 connections its first mail waited for two and a half minutes (haraka/Haraka#2507)."""
    plan = Plan(max_connections=ZoneSettings().max_connections)
    for n in range(60):
        plan.add(f"dead{n}", each)
    plan.active()
    plan.add("good", each)
    assert plan.active()["good"] == 1
    plan.finish("good")
    plan.add("good", 10)
    assert plan.active()["good"] == 10


def test_mail_that_is_withdrawn_takes_its_wish_with_it() -> None:
    """Found by simulation (seed 943): the wish of a destination whose mail was put off kept the only place of
    destinations that fail. The mail of another one waited behind it until it expired.
    """
    plan = Sharing(max_connections=6)
    plan.allowance.owners = 2  # one connection for destinations that fail
    plan.queue.round_robin.granted(plan.now)
    for name in ("a", "b"):
        plan.add(name, 1)
        plan.active()
        plan.give(name)
        plan.active()
        plan.fail(name)
        plan.give(name, 0)
    plan.now += 2 * RETRY.suspend_max
    plan.add("a", 1)
    plan.active()
    assert plan.wished == 1
    plan.queue.withdraw([key_of(3, "a")])
    wished = plan.wished
    assert wished == 0
    plan.add("b", 1)
    plan.active()
    plan.give("b")
    assert plan.active() == {"b": 1}
