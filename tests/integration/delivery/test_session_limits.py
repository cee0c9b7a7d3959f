"""Hosts that limit sessions, messages in them or recipients, and say so beforehand, by a refusal, or wrongly.

Stalwart answers DATA with 452 4.4.5 after ten messages (stalwartlabs/stalwart#1384); others refuse MAIL or
RCPT, with 4yz or 5yz, or with 421.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from msgspec import structs

from tests.integration.delivery.conftest import Bed, send
from tests.support.mail import TEXT, ZONE, Bodies, make_batch, make_message, route_to
from tests.support.sink import Sink
from tests.support.sink_conversation import Conversation, Manners, Received
from zonerelay.config.settings import ZoneSettings
from zonerelay.delivery.batch.courier import SmtpCourier
from zonerelay.delivery.connection.session_limits import REMEMBER_FOR
from zonerelay.model.clock import ManualClock
from zonerelay.model.envelope import BodyType, Message, Notify, Ret
from zonerelay.model.reply import Outcome, Scope, Verdict
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
async def test_a_limit_of_a_session_is_remembered(bed: Bed, verb: str, told: str, manners: Manners) -> None:
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
async def test_a_refusal_is_asked_about_once_and_believed(bed: Bed, told: str, verdict: Verdict) -> None:
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
        "connections are closed after 2 messages, because the host rejected more",
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
async def test_a_connection_limit_at_mail_costs_no_attempt(bed: Bed, too_many: str, at_once: int) -> None:
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


async def test_one_connection_too_many_costs_no_attempt(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
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


# ---- LIMITS (RFC 9422) is obeyed: in several transactions, on several connections ----------------


SEVEN = [f"r{number}@example.com" for number in range(7)]
THREE_DOMAINS = ["a@one.example", "b@TWO.example", "c@one.example", "d@three.example", "e@two.example"]


async def bring_to(
    courier: SmtpCourier, port: int, recipients: list[str], zone: ZoneSettings = ZONE
) -> list[Outcome]:
    batch = make_batch(make_message(recipients=recipients), route_to(port), replace(zone))
    return list(await courier.deliver(batch))


def taken(sink: Sink) -> list[list[str]]:
    return [[each.partition("@")[0] for each in message.recipients] for message in sink.messages]


@pytest.mark.parametrize("chunking", [False, True])
@pytest.mark.parametrize(
    ("limits", "batches", "connections"),
    [
        ("", [7], 1),
        ("RCPTMAX=7", [7], 1),
        ("RCPTMAX=3", [3, 3, 1], 1),
        ("RCPTMAX=1", [1] * 7, 1),
        ("RCPTMAX=3 MAILMAX=1", [3, 3, 1], 3),
        ("RCPTMAX=2 MAILMAX=3", [2, 2, 2, 1], 2),
        ("MAILMAX=1", [7], 1),
        ("RCPTMAX=0", [7], 1),
        ("RCPTMAX=-1 MAILMAX=0 RCPTDOMAINMAX=0", [7], 1),
        ("RCPTMAX=99999999999", [7], 1),
        ("RCPTMAX=many", [7], 1),
        ("RCPTMAX=3 RCPTMAX=5", [3, 3, 1], 1),
    ],
)
async def test_recipients_and_transactions(
    bed: Bed, limits: str, batches: list[int], connections: int, chunking: bool
) -> None:
    sink = await bed.sink(Manners(limits=limits, chunking=chunking))
    outcomes = await bring_to(bed.courier(), sink.port, SEVEN)
    assert [each.verdict for each in outcomes] == [D] * 7
    assert [len(each) for each in taken(sink)] == batches
    assert [each for batch in taken(sink) for each in batch] == [each.partition("@")[0] for each in SEVEN]
    assert sink.connections == connections


async def test_mailmax_ends_the_connection_between_messages(bed: Bed) -> None:
    sink = await bed.sink(Manners(limits="MAILMAX=2", messages_per_connection=2))
    courier = bed.courier()
    for _ in range(5):
        [outcome] = await bring_to(courier, sink.port, SEVEN[:1])
        assert outcome.verdict is D
    assert sink.connections == 3
    assert sink.commands.count("QUIT") == 2


APART = [["a", "c"], ["b", "e"], ["d"]]
TOGETHER = [["a", "b", "c", "d", "e"]]


@pytest.mark.parametrize("chunking", [False, True])
@pytest.mark.parametrize(
    ("next_hop", "mix", "limits", "transactions", "connections"),
    [
        ("", None, "", APART, 1),
        ("", None, "RCPTMAX=9 MAILMAX=9", APART, 1),
        ("", None, "MAILMAX=1", APART, 3),
        ("", None, "RCPTDOMAINMAX=1", APART, 3),
        ("", None, "RCPTDOMAINMAX=2", [["a", "b", "c", "e"], ["d"]], 2),
        ("", None, "RCPTDOMAINMAX=3", TOGETHER, 1),
        ("", None, "RCPTDOMAINMAX=2 RCPTMAX=2", [["a", "b"], ["c", "e"], ["d"]], 2),
        ("", None, "RCPTDOMAINMAX=1 RCPTMAX=1 MAILMAX=1", [["a"], ["b"], ["c"], ["d"], ["e"]], 5),
        ("", True, "", TOGETHER, 1),
        ("", False, "RCPTDOMAINMAX=3", APART, 1),
        ("", False, "RCPTDOMAINMAX=2", APART, 2),
        ("hop", None, "", TOGETHER, 1),
        ("hop", None, "RCPTDOMAINMAX=1", APART, 3),
        ("hop", False, "", APART, 1),
    ],
)
async def test_a_transaction_has_one_domain_unless_the_zone_or_the_host_says_that_they_mix(
    bed: Bed,
    next_hop: str,
    mix: bool | None,
    limits: str,
    transactions: list[list[str]],
    connections: int,
    chunking: bool,
) -> None:
    """Of several domains Google takes the first, and answers 451 4.3.0 for the others."""
    sink = await bed.sink(Manners(limits=limits, chunking=chunking))
    zone = replace(ZONE, next_hop=next_hop, mix_domains=mix)
    outcomes = await bring_to(bed.courier(), sink.port, THREE_DOMAINS, zone)
    assert [each.verdict for each in outcomes] == [D] * 5
    assert taken(sink) == transactions
    assert sink.connections == connections


async def test_a_connection_whose_domains_are_used_up_serves_others_no_more(bed: Bed) -> None:
    sink = await bed.sink(Manners(limits="RCPTDOMAINMAX=1"))
    courier = bed.courier()
    for recipient in ("a@one.example", "b@two.example", "c@two.example"):
        [outcome] = await bring_to(courier, sink.port, [recipient])
        assert outcome.verdict is D
    assert sink.connections == 2


async def test_what_some_are_refused_the_others_are_asked_all_the_same(bed: Bed) -> None:
    sink = await bed.sink(Manners(limits="RCPTMAX=2"))
    recipients = [
        "data-554@x.example",
        "a@x.example",
        "reject-550@x.example",
        "defer-451@x.example",
        "b@x.example",
    ]
    outcomes = await bring_to(bed.courier(), sink.port, recipients)
    assert [each.reply.code for each in outcomes] == [554, 554, 550, 451, 250]
    assert sink.connections == 1


async def test_whoever_was_not_asked_before_the_connection_broke_has_no_attempt(bed: Bed) -> None:
    sink = await bed.sink(Manners(limits="RCPTMAX=1"))
    outcomes = await bring_to(bed.courier(), sink.port, ["a@x.example", "close@x.example", "b@x.example"])
    assert [each.verdict for each in outcomes] == [D, F, F]
    assert [each.counts for each in outcomes] == [True, True, False]
    assert not any(each.in_doubt for each in outcomes)


async def test_a_server_that_takes_fewer_than_it_says_is_obeyed_too(bed: Bed) -> None:
    sink = await bed.sink(Manners(limits="RCPTMAX=4", max_recipients=3))
    outcomes = await bring_to(bed.courier(), sink.port, SEVEN)
    assert [each.verdict for each in outcomes] == [D] * 7
    assert [len(each) for each in taken(sink)] == [3, 3, 1]


# ---- parameters of an extension that a host offers and refuses ------------------------------------


EVERYTHING = Manners(dsn=True, smtputf8=True, eight_bit_mime=True, size=10_000_000)
PARAMETERS = ("SIZE=", "BODY=", "SMTPUTF8", "RET=", "ENVID=", "NOTIFY=", "ORCPT=")


class Refuses:
    """A script that answers MAIL or RCPT with parameters as `reply` says, and what follows in its wake."""

    def __init__(self, verb: str, reply: str, parameter: str = "") -> None:
        self._verb, self._reply, self._parameter = verb, reply, parameter
        self._refused = False

    def __call__(self, verb: str, argument: str) -> str | None:
        if verb in ("EHLO", "RSET", "MAIL"):
            self._refused = False
        _, _, parameters = argument.partition("> ")
        if verb == self._verb and parameters and self._parameter in parameters:
            self._refused = verb == "MAIL"
            return self._reply
        return "503 5.5.1 MAIL first" if self._refused and verb in ("RCPT", "DATA", "BDAT") else None


def batch_of(port: int, *locals_: str, message: Message | None = None) -> Batch:
    names = [f"{local}@example.com" for local in locals_ or ("ann",)]
    message = message or make_message(recipients=names, declared=BodyType.EIGHT_BIT, smtputf8=True)
    envelope = structs.replace(message.envelope, ret=Ret.HDRS, envid="order-1")
    batch = make_batch(structs.replace(message, envelope=envelope), route_to(port))
    deliveries = [structs.replace(each, notify=Notify.FAILURE) for each in batch.deliveries]
    return structs.replace(batch, deliveries=tuple(deliveries))


async def bring(courier: SmtpCourier, batch: Batch) -> list[Outcome]:
    return list(await courier.deliver(batch))


@pytest.mark.parametrize("pipelining", [True, False])
@pytest.mark.parametrize("chunking", [True, False])
@pytest.mark.parametrize("verb", ["MAIL", "RCPT"])
@pytest.mark.parametrize(
    "reply",
    ["555 5.5.4 Unsupported option", "501 Syntax error", "504 5.5.4 no", "550 5.5.4 no", "451 4.5.4 what"],
)
async def test_mail_goes_without_them_and_the_host_is_remembered(
    bed: Bed, verb: str, reply: str, chunking: bool, pipelining: bool
) -> None:
    sink = await bed.sink(
        replace(EVERYTHING, chunking=chunking, pipelining=pipelining), script=Refuses(verb, reply)
    )
    clock = ManualClock()
    courier = bed.courier(clock=clock)
    for count, asked in ((1, 2), (2, 3)):
        [outcome] = await bring(courier, batch_of(sink.port))
        assert (outcome.verdict, outcome.dsn_passed) == (Verdict.DELIVERED, False), outcome.reply
        assert len(sink.messages) == count
        assert len([each for each in sink.commands if each.startswith("MAIL")]) == asked
    assert sink.connections == 1
    assert not [each for each in sink.commands[-4:] if any(name in each for name in PARAMETERS)]
    assert any("few MAIL and RCPT parameters" in line for line in courier.learned(f"127.0.0.1:{sink.port}"))
    clock.advance(REMEMBER_FOR + 1)
    assert courier.learned(f"127.0.0.1:{sink.port}") == ()


async def test_only_the_recipients_that_were_refused_are_asked_again(bed: Bed) -> None:
    seen: list[str] = []

    def script(verb: str, argument: str) -> str | None:
        if verb == "RCPT" and "bob@" in argument and "NOTIFY" in argument:
            seen.append(argument)
            return "555 5.5.4 not for this one"
        return None

    sink = await bed.sink(EVERYTHING, script=script)
    outcomes = await bring(bed.courier(), batch_of(sink.port, "ann", "bob", "reject-550"))
    assert [each.verdict for each in outcomes] == [Verdict.DELIVERED, Verdict.DELIVERED, Verdict.BOUNCED]
    assert [each.recipients for each in sink.messages] == [("ann@example.com",), ("bob@example.com",)]
    assert len(seen) == 1
    assert [each.dsn_passed for each in outcomes[:2]] == [True, False]


@pytest.mark.parametrize("verb", ["MAIL", "RCPT"])
async def test_a_refusal_without_parameters_is_final(bed: Bed, verb: str) -> None:
    sink = await bed.sink(EVERYTHING, script=lambda said, _: "501 5.5.4 never" if said == verb else None)
    courier = bed.courier()
    [outcome] = await bring(courier, batch_of(sink.port))
    assert (outcome.verdict, outcome.reply.code) == (Verdict.BOUNCED, 501)
    assert courier.learned(f"127.0.0.1:{sink.port}") == ()


@pytest.mark.parametrize("reply", ["501 5.1.3 bad address", "550 5.1.1 unknown", "550 5.7.1 no", "552 full"])
async def test_a_refusal_about_something_else_is_not_asked_about(bed: Bed, reply: str) -> None:
    sink = await bed.sink(EVERYTHING, script=Refuses("RCPT", reply))
    [outcome] = await bring(bed.courier(), batch_of(sink.port))
    assert outcome.verdict is not Verdict.DELIVERED
    assert len([each for each in sink.commands if each.startswith("RCPT")]) == 1


@pytest.mark.parametrize(
    ("message", "parameter"),
    [
        (make_message(TEXT.replace(b"e", b"\xe9"), eight_bit=True), "BODY=8BITMIME"),
        (make_message(recipients=["jörg@example.com"], smtputf8=True), "SMTPUTF8"),
    ],
)
async def test_what_the_message_needs_is_said_again(bed: Bed, message: Message, parameter: str) -> None:
    sink = await bed.sink(EVERYTHING, script=Refuses("MAIL", "555 5.5.4 what is SIZE", "SIZE="))
    bodies = Bodies(TEXT.replace(b"e", b"\xe9")) if message.eight_bit else None
    courier = bed.courier(bodies)
    batch = make_batch(message, route_to(sink.port))
    [outcome] = await bring(courier, batch)
    assert outcome.verdict is Verdict.DELIVERED, outcome.reply
    last = [each for each in sink.commands if each.startswith("MAIL")][-1]
    assert parameter in last
    assert "SIZE=" not in last
