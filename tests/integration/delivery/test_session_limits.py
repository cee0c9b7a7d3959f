"""Hosts that limit messages in a session, or sessions at a time, and say so with an ordinary refusal.

Stalwart answers DATA with 452 4.4.5 after ten messages (stalwartlabs/stalwart#1384); others refuse MAIL or
RCPT, with 4yz or 5yz, or with 421.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from tests.integration.delivery.conftest import Bed
from tests.support.mail import ZONE, make_batch, make_message, route_to
from tests.support.sink import Sink
from tests.support.sink_conversation import Conversation, Manners, Received
from zonerelay.delivery.batch.courier import SmtpCourier
from zonerelay.model.clock import ManualClock
from zonerelay.model.outcome import Outcome, Scope, Verdict
from zonerelay.routing.destinations.route import Batch

D, F, B = Verdict.DELIVERED, Verdict.DEFERRED, Verdict.BOUNCED


@dataclass(eq=False)
class Host(Sink):
    """A server. `per_session`: it answers `verb` with `told` after so many messages on a connection.

    `at_once`: so many connections may have a MAIL; the others are told `too_many` there. `answers`: replies
    to RCPT by the local part, and to MAIL by the sender's. `greeted`: more connections than these are refused
    with `told`. `slow`: what a message waits for after its dot.
    """

    per_session: int | None = None
    verb: str = "DATA"
    told: str = "452 4.4.5 Maximum number of messages per session exceeded"
    at_once: int | None = None
    greeted: int | None = None
    too_many: str = "432 4.3.2 Concurrent connections limit exceeded"
    answers: dict[str, Callable[[], str]] = field(default_factory=dict)
    manners: Manners = field(default_factory=Manners)
    slow: asyncio.Event | None = None
    holders: set[object] = field(default_factory=set)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        super().__init__(manners=self.manners)

    def conversation(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Conversation:
        return _Session(self, reader, writer)

    async def accept(self, message: Received) -> None:
        self.arrived.set()
        if self.slow is not None:
            await self.slow.wait()
        await super().accept(message)

    @property
    def taken(self) -> list[str]:
        return [each.partition("@")[0] for message in self.messages for each in message.recipients]


class _Session(Conversation):
    def __init__(self, host: Host, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(host, reader, writer)
        self._host = host

    async def run(self) -> None:
        if self._host.greeted is not None and self._host.connections > self._host.greeted:
            await self._reply(self._host.told)
            return
        try:
            await super().run()
        finally:
            self._host.holders.discard(self)

    async def _command(self, verb: str, argument: str) -> None:
        if verb == "MAIL":
            self._reset()
        if refusal := self._refusal(verb, argument):
            if verb == "BDAT":
                await self._octets(int(argument.split(maxsplit=1)[0]))
            self._open = not refusal.startswith("421")
            await self._reply(refusal)
            return
        if verb == "MAIL":
            self._host.holders.add(self)
        await super()._command(verb, argument)

    def _refusal(self, verb: str, argument: str) -> str:
        host = self._host
        if verb == host.verb and self._is_spent:
            return host.told
        is_holder = self in host.holders or host.at_once is None or len(host.holders) < host.at_once
        if verb == "MAIL" and not is_holder:
            return host.too_many
        if verb == "RCPT" and not self._mail_from:
            return "503 5.5.1 no sender"
        answer = host.answers.get(argument.partition("<")[2].partition("@")[0])
        reply = "" if answer is None else answer()
        return "" if reply.startswith("250") else reply

    @property
    def _is_spent(self) -> bool:
        return self._host.per_session is not None and self._accepted >= self._host.per_session

    async def _answer_message(self, *given: Any) -> None:
        if self._host.verb == "DOT" and self._is_spent:
            await self._reply(self._host.told)
        else:
            await super()._answer_message(*given)


def batch_for(port: int, *recipients: str, sender: str = "sender@example.org") -> Batch:
    addresses = [f"{each}@example.com" for each in recipients]
    return make_batch(make_message(sender=sender, recipients=addresses), route_to(port), ZONE)


async def send(
    courier: SmtpCourier, port: int, *recipients: str, sender: str = "sender@example.org"
) -> list[Outcome]:
    return list(await courier.deliver(batch_for(port, *recipients, sender=sender)))


TOLD = [
    ("DATA", "452 4.4.5 Maximum number of messages per session exceeded"),
    ("DATA", "554 5.5.0 enough"),
    ("DATA", "421 4.7.0 too many messages in this connection"),
    ("MAIL", "452 4.4.5 too many transactions"),
    ("MAIL", "550 too many messages"),
    ("MAIL", "421 4.4.5 too many messages"),
    ("RCPT", "452 4.5.3 too many recipients in this session"),
    ("RCPT", "451 4.7.1 too many messages in this session"),
    ("RCPT", "550 5.7.1 too many messages in this session"),
    ("RCPT", "421 4.7.0 too many messages"),
]


@pytest.mark.parametrize("manners", [Manners(), Manners(pipelining=False), Manners(chunking=True)])
@pytest.mark.parametrize(("verb", "told"), TOLD)
async def test_a_limit_of_a_session_costs_no_attempt_and_is_remembered(
    bed: Bed, verb: str, told: str, manners: Manners
) -> None:
    if manners.chunking and verb == "DATA":
        verb = "BDAT"
    host = Host(per_session=3, verb=verb, told=told, manners=manners)
    port = (await bed.start(host)).port
    courier = bed.courier()
    for number in range(15):
        [outcome] = await send(courier, port, f"r{number}")
        assert outcome.verdict is D, outcome
    assert host.taken == [f"r{number}" for number in range(15)]
    assert host.connections == 5
    # Once it was refused; from then on each connection ended with its third message.
    assert sum(line.startswith("MAIL") for line in host.commands) == 16


GENUINE = [
    ("550 5.1.1 <{}@example.com>: no such user", B),
    ("554 {} is not here (case 4711{})", B),
    ("450 4.2.0 greylisted, see http://grey.example/{}", F),
]


@pytest.mark.parametrize(("told", "verdict"), GENUINE)
async def test_a_refusal_of_the_mail_is_asked_about_once_and_then_believed(
    bed: Bed, told: str, verdict: Verdict
) -> None:
    bad = [f"bad{number}" for number in range(30)]
    host = Host()
    for each in bad:
        host.answers[each] = partial(told.format, each, each)
    port = (await bed.start(host)).port
    courier = bed.courier()
    [first] = await send(courier, port, "good")
    assert first.verdict is D
    for each in bad:
        [refused] = await send(courier, port, each)
        assert (refused.verdict, refused.counts, refused.reply.text.count(each)) == (
            verdict,
            True,
            told.count("{"),
        )
        [taken] = await send(courier, port, "good")
        assert taken.verdict is D
    assert host.connections == 2
    assert sum("bad" in line for line in host.commands) == 31


async def test_replies_that_are_never_the_same_cost_a_few_connections(bed: Bed) -> None:
    words = [f"{chr(97 + number)}" * 5 for number in range(20)]
    host = Host()
    for each in words:
        host.answers[each] = partial("450 {} go away".format, each)
    port = (await bed.start(host)).port
    courier = bed.courier()
    for each in words:
        assert [one.verdict for one in await send(courier, port, "good")] == [D]
        assert [one.verdict for one in await send(courier, port, each)] == [F]
    assert host.connections == 9


async def test_a_limit_is_found_although_the_host_refuses_recipients_as_well(bed: Bed) -> None:
    host = Host(per_session=3, verb="RCPT", told="550 too many messages in this session")
    host.answers["bad"] = lambda: "550 no such user"
    port = (await bed.start(host)).port
    courier = bed.courier()
    for number in range(12):
        recipient = "bad" if number % 3 == 1 else f"r{number}"
        [outcome] = await send(courier, port, recipient)
        assert (outcome.verdict is B) == (recipient == "bad"), outcome
    assert host.taken == [f"r{number}" for number in range(12) if number % 3 != 1]


async def test_a_refused_sender_is_final_and_refused_at_once_the_next_time(bed: Bed) -> None:
    host = Host(answers={"bad": lambda: "550 5.7.1 <bad@example.org> may not send here"})
    port = (await bed.start(host)).port
    courier = bed.courier()
    for _ in range(5):
        assert [each.verdict for each in await send(courier, port, "a")] == [D]
        [refused] = await send(courier, port, "b", sender="bad@example.org")
        assert (refused.verdict, refused.scope, refused.reply.code) == (B, Scope.MESSAGE, 550)
    assert host.connections == 2


async def test_only_recipients_without_an_answer_of_their_own_are_asked_again(bed: Bed) -> None:
    host = Host(per_session=1, answers={"bad": lambda: "550 5.1.1 no such user"})
    port = (await bed.start(host)).port
    courier = bed.courier()
    await send(courier, port, "first")
    outcomes = await send(courier, port, "a", "bad", "b")
    assert [each.verdict for each in outcomes] == [D, B, D]
    assert host.taken == ["first", "a", "b"]
    assert sum("bad" in line for line in host.commands) == 1


async def test_a_limit_of_one_makes_a_connection_for_each_message(bed: Bed) -> None:
    host = Host(per_session=1)
    port = (await bed.start(host)).port
    clock = ManualClock()
    courier = bed.courier(clock=clock)
    for _ in range(6):
        assert [each.verdict for each in await send(courier, port, "a")] == [D]
    assert host.connections == 6
    assert host.commands.count("DATA") == 7
    host.per_session = None
    clock.advance(25 * 3600.0)  # another day
    for _ in range(6):
        assert [each.verdict for each in await send(courier, port, "a")] == [D]
    assert host.connections == 7


async def test_the_number_is_learned_again_when_the_host_takes_fewer(bed: Bed) -> None:
    host = Host(per_session=5)
    port = (await bed.start(host)).port
    courier = bed.courier()
    for _ in range(11):
        assert [each.verdict for each in await send(courier, port, "a")] == [D]
    host.per_session = 2
    for _ in range(20):
        assert [each.verdict for each in await send(courier, port, "a")] == [D]
    assert courier.learned(f"127.0.0.1:{port}") == (
        "a connection ends after 2 messages: the host refused more",
    )


async def test_a_chance_refusal_does_not_lower_the_number(bed: Bed) -> None:
    host = Host(per_session=6)
    port = (await bed.start(host)).port
    courier = bed.courier()
    for _ in range(15):
        await send(courier, port, "a")
    moods = iter(["451 4.3.0 try again"])
    host.answers["moody"] = lambda: next(moods, "250 ok")
    await send(courier, port, "a")
    assert [each.verdict for each in await send(courier, port, "moody")] == [D]
    [line] = courier.learned(f"127.0.0.1:{port}")
    assert "after 6 messages" in line


async def test_a_host_that_cannot_be_asked_again_costs_no_attempt_and_no_mail(bed: Bed) -> None:
    host = Host(per_session=1, verb="MAIL", told="550 too many messages")
    port = (await bed.start(host)).port
    courier = bed.courier()
    await send(courier, port, "a")
    batch = batch_for(port, "b")
    turns = iter([True, False])

    async def take_turn() -> bool:
        return next(turns)

    batch.take_turn = take_turn
    [outcome] = await courier.deliver(batch)
    assert (outcome.verdict, outcome.counts) == (F, False)
    assert [each.verdict for each in await send(courier, port, "b")] == [D]


async def test_many_recipients_at_a_host_with_both_limits_go_in_several_sessions(bed: Bed) -> None:
    host = Host(per_session=2, manners=Manners(limits="RCPTMAX=2"))
    port = (await bed.start(host)).port
    outcomes = await send(bed.courier(), port, *(f"r{number}" for number in range(11)))
    assert [each.verdict for each in outcomes] == [D] * 11
    assert len(host.taken) == 11
    assert host.connections == 3


async def test_after_a_refused_final_dot_the_connection_is_not_used_again(bed: Bed) -> None:
    host = Host(per_session=1, verb="DOT", told="452 4.4.5 too many messages")
    port = (await bed.start(host)).port
    courier = bed.courier()
    verdicts = [(await send(courier, port, "a"))[0].verdict for _ in range(6)]
    assert verdicts == [D, F] * 3
    assert host.connections == 3


TOO_MANY = [
    "432 4.3.2 Concurrent connections limit exceeded",
    "550 too many connections",
    "421 4.3.2 too many",
]


@pytest.mark.parametrize("too_many", TOO_MANY)
@pytest.mark.parametrize("at_once", [1, 2, 4])
async def test_a_limit_of_connections_told_at_mail_costs_no_attempt(
    bed: Bed, too_many: str, at_once: int
) -> None:
    host = Host(at_once=at_once, too_many=too_many, slow=asyncio.Event())
    port = (await bed.start(host)).port
    courier = bed.courier()
    batches = [batch_for(port, f"r{number}") for number in range(8)]
    sending = [asyncio.create_task(courier.deliver(batch)) for batch in batches]
    while host.commands.count("DATA") < at_once or sum(each[:4] == "MAIL" for each in host.commands) < 8:
        await asyncio.sleep(0.01)
    assert host.slow is not None
    host.slow.set()
    outcomes = [outcome for each in await asyncio.gather(*sending) for outcome in each]
    assert [each.verdict for each in outcomes] == [D] * 8
    assert len(host.taken) == 8
    told = [batch.most_connections for batch in batches if batch.most_connections is not None]
    assert min(told) == at_once


async def test_a_refused_sender_is_final_on_the_next_idle_connection(bed: Bed) -> None:
    host = Host(slow=asyncio.Event(), answers={"bad": lambda: "550 5.7.1 may not send here"})
    port = (await bed.start(host)).port
    courier = bed.courier()
    first = asyncio.create_task(send(courier, port, "a"))
    await host.arrived.wait()
    second = asyncio.create_task(send(courier, port, "b", sender="bad@example.org"))
    while host.connections < 2 or sum("bad@" in each for each in host.commands) < 1:
        await asyncio.sleep(0.01)
    assert host.slow is not None
    host.slow.set()
    [taken], [refused] = await asyncio.gather(first, second)
    assert (taken.verdict, refused.verdict) == (D, B)
    assert sum("bad@" in each for each in host.commands) == 2
    host.slow.clear()
    third = asyncio.create_task(send(courier, port, "a"))
    [refused] = await send(courier, port, "b", sender="bad@example.org")
    assert refused.verdict is B
    assert sum("bad@" in each for each in host.commands) == 3
    host.slow.set()
    await third


async def test_a_refused_sender_is_final_when_all_connections_are_refused(bed: Bed) -> None:
    host = Host(answers={"bad": lambda: "550 5.7.1 may not send here"})
    port = (await bed.start(host)).port
    courier = bed.courier()
    sending = [send(courier, port, f"r{number}", sender="bad@example.org") for number in range(8)]
    outcomes = [outcome for each in await asyncio.gather(*sending) for outcome in each]
    assert [each.verdict for each in outcomes] == [B] * 8


async def test_mail_that_is_one_connection_too_many_waits_without_an_attempt(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zonerelay.delivery.batch.courier.FEWER_PATIENCE", 0.05)
    host = Host(at_once=1, too_many="550 too many connections", slow=asyncio.Event())
    port = (await bed.start(host)).port
    courier = bed.courier()
    first = asyncio.create_task(send(courier, port, "a"))
    await host.arrived.wait()
    batch = batch_for(port, "b")
    [outcome] = await courier.deliver(batch)
    assert (outcome.verdict, outcome.counts, batch.most_connections) == (F, False, 1)
    assert host.slow is not None
    host.slow.set()
    assert [each.verdict for each in await first] == [D]
    assert [each.verdict for each in await send(courier, port, "b")] == [D]


async def test_both_limits_at_one_host(bed: Bed) -> None:
    host = Host(per_session=3, verb="MAIL", told="550 too many messages", at_once=2)
    port = (await bed.start(host)).port
    courier = bed.courier()
    outcomes = []
    for _ in range(6):
        sending = [send(courier, port, f"r{number}") for number in range(6)]
        outcomes += [outcome for each in await asyncio.gather(*sending) for outcome in each]
    assert {each.verdict for each in outcomes} <= {D, F}
    assert not any(each.counts for each in outcomes if each.verdict is F)
    assert sum(each.verdict is D for each in outcomes) >= 30


@pytest.mark.parametrize("told", ["421 4.3.2 too many connections", "554 too many connections"])
async def test_a_connection_too_many_that_is_not_greeted_costs_no_attempt(bed: Bed, told: str) -> None:
    host = Host(greeted=1, told=told, slow=asyncio.Event())
    port = (await bed.start(host)).port
    courier = bed.courier()
    first = asyncio.create_task(send(courier, port, "a"))
    await host.arrived.wait()
    [outcome] = await send(courier, port, "b")
    assert (outcome.verdict, outcome.scope, outcome.counts) == (F, Scope.HOST, False)
    assert host.slow is not None
    host.slow.set()
    assert [each.verdict for each in await first] == [D]
    await courier.pool.close()
    [outcome] = await send(courier, port, "b")
    assert (outcome.verdict, outcome.counts) == (F, True)
