"""Requests against the queue's real operations: memory store, scheduler, settler; no network."""

import asyncio
import itertools
import os
import pwd
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from tests.support.control import control_socket
from tests.support.mail import make_sources
from tests.support.queueing import DEFERRED, TEXT, Relay, ScriptedRouter
from zonerelay.config.settings import DnsSettings, RouteSettings, ZoneSettings
from zonerelay.config.user_limits import UserLimits
from zonerelay.control.client import ControlClient
from zonerelay.control.explain import Explainer
from zonerelay.control.handler import Bodies, ControlHandler
from zonerelay.control.orders import OrderAnswers
from zonerelay.control.streams import LiveStreams
from zonerelay.delivery.rewrite.rendering import Renderer
from zonerelay.model.clock import ManualClock, SystemClock
from zonerelay.model.delivery import DeliveryState
from zonerelay.model.envelope import Mailbox
from zonerelay.model.reply import Outcome, Reply, Scope, Verdict
from zonerelay.operations import answers, requests
from zonerelay.operations.errors import ControlError, NotFoundError
from zonerelay.process import tasks
from zonerelay.queue.operator import operations
from zonerelay.queue.operator.journal import KEPT
from zonerelay.queue.orders.orders import Orders
from zonerelay.routing.destinations.mx import MxRouter
from zonerelay.routing.destinations.route import MxHost, Route, Unroutable
from zonerelay.routing.dns.resolver import Hosts, Resolver
from zonerelay.routing.zones.zones import Zones
from zonerelay.store.contract import StoreError
from zonerelay.telemetry.logs.redact import Redactor

REDACTOR = Redactor(b"k" * 32, enabled=True)
ZONES = (
    ZoneSettings(name="default"),
    ZoneSettings(name="local", next_hop="sink.test", allow_private_addresses=True),
)
ROUTES = (RouteSettings(zone="local", recipient_domain=("local.example",)),)


async def no_status() -> answers.RelayStatus:
    raise StoreError("input/output error")


async def no_refresh() -> None:
    raise AssertionError("only a supervisor asks for metrics")


async def no_reasons() -> list[str]:
    raise AssertionError("only a supervisor asks whether a worker is ready")


async def no_rate(_zone: str, _domain: str) -> None:
    return None


async def nothing_lost(_loss: str) -> bool:
    return False


async def no_limits(_user: str) -> UserLimits:
    return UserLimits()


@dataclass
class Desk:
    """An operator's end of a relay whose queue stands still."""

    relay: Relay
    router: ScriptedRouter
    client: ControlClient

    async def ask(self, request: requests.Request) -> list[answers.Frame]:
        return await asyncio.to_thread(lambda: list(self.client.stream(request)))

    async def rows(self, **wanted: object) -> list[str]:
        frames = await self.ask(requests.QueueList(filter=requests.Filter(**wanted)))  # type: ignore[arg-type]  # fields by name
        return [frame.recipient for frame in frames if isinstance(frame, answers.DeliveryRow)]

    async def change(self, request: requests.QueueChange) -> answers.ChangeResult:
        return await asyncio.to_thread(self.client.ask, request, answers.ChangeResult)


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    relay = Relay(clock=ManualClock())
    relay.router.gated.add("")  # no route is ever found, so nothing leaves by itself
    verbs = relay.operations(tmp_path)
    router = ScriptedRouter()
    resolver = Resolver(
        DnsSettings(servers=("127.0.0.1:1",)),
        SystemClock(),
        hosts=Hosts(dict.fromkeys(("mx.example.com", "mx.busy", "sink.test"), ("127.0.0.1",))),
    )
    renderer = Renderer(read_body=relay.store.read_body, events=relay.events, clock=relay.clock)
    zones = Zones(ZONES, ROUTES)
    handler = ControlHandler(
        operations=verbs,
        refresh=no_refresh,
        unready=no_reasons,
        phase_of=lambda key: None,
        turn_of=no_rate,
        acknowledge=nothing_lost,
        webhooks=lambda: None,
        history=None,
        status=no_status,
        explainer=Explainer(
            zones=zones,
            router=cast("MxRouter", router),
            resolver=resolver,
            hostname="relay.example.org",
            clock=relay.clock,
            selection=make_sources(relay.clock),
            listeners=tuple,
            rewriting=lambda: None,
            srs=lambda: None,
            keys=lambda: None,
            rails=no_limits,
            credential=lambda zone, sender: "",
            suspended=lambda key: (99.0, "421 busy") if "mx.busy" in key else (None, ""),
        ),
        orders=OrderAnswers(
            Orders(
                tmp_path,
                settler=relay.settler,
                zone_of=zones.known_before,
                changed=lambda: None,
                release=verbs.release_orders,
                events=relay.events,
                clock=relay.clock,
            ),
            verbs,
            lambda: ["default"],
        ),
        redactor=REDACTOR,
        streams=LiveStreams(relay.events, REDACTOR),
        bodies=Bodies(
            relay.store,
            renderer,
            zone={"default": ZoneSettings(header_add=("X-Zone: default",))}.get,
            read=relay.events.body_read,
        ),
    )
    server = control_socket(tmp_path / "control.sock", handler, relay.events.error)
    await server.start()
    yield Desk(relay, router, ControlClient(tmp_path / "control.sock"))
    await server.close()
    await resolver.close()
    await relay.close()
    assert relay.sink.named("trouble") == []


async def test_a_message_with_many_recipients_is_shown_in_slices(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20,000 of them stopped the event loop for half a second, also for an application that asks what became
    of its message.
    """
    monkeypatch.setattr(tasks, "SLICE", 0.0)
    turns, seen = itertools.count(), list[int]()

    def compared(_explainer: Explainer, _message: object, row: answers.DeliveryRow) -> answers.DeliveryRow:
        seen.append(next(turns))
        return row

    async def turn() -> None:
        while True:
            next(turns)
            await asyncio.sleep(0)

    monkeypatch.setattr(Explainer, "compared", compared)
    message = desk.relay.accept(*(f"u{number}@busy.example" for number in range(20)))
    turning = asyncio.create_task(turn())
    shown, _ = await desk.ask(requests.QueueShow(message_id=message.id))
    await tasks.cancel_all(turning)
    assert isinstance(shown, answers.MessageDetail)
    assert len(shown.deliveries) == len(seen) == 20
    assert seen[-1] - seen[0] > 30


async def test_a_list_has_every_recipient_oldest_message_first(desk: Desk) -> None:
    desk.relay.accept("a@example.com", "b@example.net")
    desk.relay.accept("c@example.com")
    assert await desk.rows() == ["a@example.com", "b@example.net", "c@example.com"]
    assert await desk.rows(domain="*.net") == ["b@example.net"]
    assert await desk.rows(sender="<>") == []


async def test_a_limit_says_whether_there_is_more(desk: Desk) -> None:
    desk.relay.accept("a@example.com", "b@example.com")
    row, end = await desk.ask(requests.QueueList(limit=1))
    assert isinstance(row, answers.DeliveryRow)
    assert end == answers.EndFrame(count=1, more=True, next=answers.cursor_of(row))
    assert (await desk.ask(requests.QueueList(limit=2)))[-1] == answers.EndFrame(count=2, more=False)


async def test_dropped_mail_is_listed_by_its_state_and_counted_by_the_preview_of_a_purge(desk: Desk) -> None:
    desk.relay.accept("a@example.com", "b@example.com", "c@example.com")
    await desk.change(requests.Drop(filter=requests.Filter(recipient="a@*")))
    await desk.change(requests.Drop(filter=requests.Filter(recipient="b@*")))
    assert await desk.rows() == ["c@example.com"]
    in_bin = requests.Filter(state=DeliveryState.DROPPED, zone="default")
    row, end = await desk.ask(requests.QueueList(filter=in_bin, limit=1))
    assert isinstance(row, answers.DeliveryRow)
    assert isinstance(end, answers.EndFrame)
    assert (row.recipient, row.state, row.next_attempt) == (
        "a@example.com", "dropped", desk.relay.clock.now() + KEPT
    )  # fmt: skip
    row, end = await desk.ask(requests.QueueList(filter=in_bin, cursor=end.next))
    assert (isinstance(row, answers.DeliveryRow) and row.recipient) == "b@example.com"

    async def previewed(request: requests.QueueChange) -> int:
        return (await asyncio.to_thread(desk.client.ask, request, answers.Count)).matched

    wanted = requests.Filter(domain="example.com")
    assert await previewed(requests.Drop(filter=wanted, dry_run=True)) == 1
    assert await previewed(requests.Drop(filter=wanted, dry_run=True, purge=True)) == 3
    assert await previewed(requests.Drop(filter=in_bin, dry_run=True, purge=True)) == 2
    for request in (requests.Hold(filter=in_bin), requests.Drop(filter=in_bin, dry_run=True)):
        with pytest.raises(ControlError, match="cannot be changed: `zonerelay undo` restores it"):
            await desk.ask(request)
    assert (await desk.change(requests.Drop(filter=in_bin, purge=True))).changed == 2


async def test_a_count_brings_a_sample(desk: Desk) -> None:
    desk.relay.accept("a@example.com", "b@example.com", "c@example.com")
    frames = await desk.ask(requests.QueueCount(filter=requests.Filter(domain="example.com"), sample=2))
    count, end = frames
    assert isinstance(count, answers.Count)
    assert isinstance(end, answers.EndFrame)
    assert (count.matched, len(count.sample)) == (3, 2)


async def test_a_row_knows_its_message_and_its_last_attempt(desk: Desk) -> None:
    message = desk.relay.accept("a@example.com", sender="")
    (delivery,) = await desk.relay.stored()
    now = desk.relay.clock.now()
    deferred = delivery.deferred(now + 60, DEFERRED.attempt(now))
    await desk.relay.store.update([delivery.key], lambda _: deferred)
    row, _ = await desk.ask(requests.QueueList())
    assert row == answers.DeliveryRow(
        message_id=message.id,
        zone="default",
        sender="",
        recipient="a@example.com",
        domain="example.com",
        state="deferred",
        created=now,
        attempts=1,
        next_attempt=now + 60,
        size=message.size,
        reply="451 4.2.0 later",
        host="mx.example.com",
        peer="192.0.2.1:25",
        last_attempt=now,
        priority="normal",
    )


async def test_an_empty_filter_alone_changes_nothing(desk: Desk) -> None:
    desk.relay.accept("a@example.com")
    with pytest.raises(ControlError, match="no deliveries selected"):
        await desk.change(requests.Drop())
    assert await desk.rows() == ["a@example.com"]
    changed = await desk.change(requests.Drop(everything=True))
    assert changed.changed == 1


async def test_a_body_is_read_as_received_and_as_sent_and_the_log_says_by_whom(desk: Desk) -> None:
    message = desk.relay.accept("a@example.com")

    async def body(request: requests.QueueCat) -> tuple[answers.MessageBody, bytes]:
        head, *pieces, _ = await desk.ask(request)
        assert isinstance(head, answers.MessageBody)
        return head, b"".join(each.octets for each in pieces if isinstance(each, answers.BodyPiece))

    head, stored = await body(requests.QueueCat(message_id=message.id))
    assert (stored, head.size, head.zone) == (TEXT, len(TEXT), "")
    head, sent = await body(requests.QueueCat(message_id=message.id, as_sent=True))
    assert sent.partition(b"\r\n\r\n")[2] == TEXT.partition(b"\r\n\r\n")[2]
    assert b"X-Zone: default\r\n" in sent
    assert (len(sent), "default") == (head.size, head.zone)
    us = pwd.getpwuid(os.getuid()).pw_name
    first, second = desk.relay.sink.named("body-read")
    assert str(first["by"]).startswith(us)
    assert second == {"id": message.id, "zone": "default", "by": first["by"]}


async def test_a_summary_counts_by_what_is_asked_and_by_age(desk: Desk) -> None:
    relay = desk.relay
    relay.accept("a@example.com", "b@example.com", "c@example.org", sender="app@example.org")
    relay.accept("a@example.com", sender="", age=900.0, zone="bulk")

    async def rows(by: str, **wanted: object) -> dict[str, int]:
        request = requests.QueueSummary(by=by, filter=requests.Filter(**wanted))  # type: ignore[arg-type]  # by name
        (found, _) = await desk.ask(request)
        assert isinstance(found, answers.Summary)
        assert found.every == 1
        assert all(sum(row.ages) == row.total for row in found.rows)
        return {row.key: row.total for row in found.rows}

    assert list((await rows("domain")).items()) == [("example.com", 3), ("example.org", 1)]
    assert await rows("zone") == {"default": 3, "bulk": 1}
    assert await rows("sender") == {"app@example.org": 3, "<>": 1}
    assert await rows("sender", domain="example.org") == {"app@example.org": 1}
    assert await rows("user") == {"(no log-in)": 4}
    assert await rows("priority", zone="bulk") == {"normal": 1}
    assert await rows("reply") == {"(no attempt yet)": 4}
    assert await rows("site") == {"(not known)": 4}
    (found, _) = await desk.ask(requests.QueueSummary(by="zone", filter=requests.Filter(zone="bulk")))
    assert isinstance(found, answers.Summary)
    assert [row.ages[2] for row in found.rows] == [1]


async def test_a_large_queue_is_estimated_unless_exact(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "SAMPLE", 10)
    for number in range(200):
        desk.relay.accept(f"u{number}@example.{'com' if number % 4 else 'org'}", tell=False)
    (estimate, _) = await desk.ask(requests.QueueSummary())
    (exact, _) = await desk.ask(requests.QueueSummary(exact=True))
    assert isinstance(estimate, answers.Summary)
    assert isinstance(exact, answers.Summary)
    assert (estimate.every, exact.every) == (20, 1)
    assert 100 <= sum(row.total for row in estimate.rows) <= 600
    assert all(row.total % 20 == 0 for row in estimate.rows)
    assert [(row.key, row.total) for row in exact.rows] == [("example.com", 150), ("example.org", 50)]


async def test_a_zone_is_chosen_only_where_the_message_is_in_it(desk: Desk) -> None:
    message = desk.relay.accept("a@example.com", zone="gone")
    for zone, words in (("", "zone gone is not configured"), ("other", "its zones are gone")):
        with pytest.raises(ControlError, match=words):
            await desk.ask(requests.QueueCat(message_id=message.id, as_sent=True, zone=zone))


@pytest.mark.parametrize(
    "request_",
    [
        requests.QueueShow(message_id="f" * 16),
        requests.QueueTrace(message_id="f" * 16),
        requests.QueueCat(message_id="f" * 16),
    ],
)
async def test_a_message_that_is_not_there_is_not_found(desk: Desk, request_: requests.Request) -> None:
    with pytest.raises(NotFoundError):
        await desk.ask(request_)


async def test_a_stores_trouble_is_told_in_its_words(desk: Desk) -> None:
    with pytest.raises(ControlError, match="the spool: input/output error"):
        await desk.ask(requests.Status())


async def test_a_pseudonym_finds_its_address_once(desk: Desk) -> None:
    first = desk.relay.accept("ann@example.com", "bob@example.com", sender="app@example.org")
    desk.relay.accept("ann@example.com", sender="app@example.org")

    async def found(mailbox: str) -> list[answers.Frame]:
        return (await desk.ask(requests.Resolve(pseudonym=REDACTOR.mailbox(Mailbox(mailbox)))))[:-1]

    assert await found("ann@example.com") == [
        answers.ResolvedAddress(address="ann@example.com", role="recipient", message_id=first.id)
    ]
    assert await found("app@example.org") == [
        answers.ResolvedAddress(address="app@example.org", role="sender", message_id=first.id)
    ]
    assert await found("eve@example.com") == []


async def test_a_domains_pseudonym_finds_everybody_in_it(desk: Desk) -> None:
    desk.relay.accept("ann@example.com", "bob@example.com", "eve@example.net", sender="")
    pseudonym = REDACTOR.mailbox(Mailbox("x@example.com")).partition("@")[2]
    frames = await desk.ask(requests.Resolve(pseudonym=pseudonym))
    assert [frame.address for frame in frames if isinstance(frame, answers.ResolvedAddress)] == [
        "ann@example.com",
        "bob@example.com",
    ]


async def explain(desk: Desk, address: str, sender: str = "") -> answers.Explanation:
    return await asyncio.to_thread(
        desk.client.ask, requests.Explain(address=address, sender=sender), answers.Explanation
    )


async def test_explain_names_the_rule_the_next_hop_and_the_addresses(desk: Desk) -> None:
    hop = Route("local", "sink.test", (MxHost("sink.test", 2626),), expires=1e12)
    desk.router.answers[""] = hop
    explained = await explain(desk, "Ann <Ann@Local.Example>")
    assert explained.address == "Ann@Local.Example"
    assert (explained.zone, explained.rule) == ("local", 1)
    assert explained.reason == "recipient_domain matches local.example"
    assert explained.next_hop == "sink.test"
    (host,) = explained.hosts
    assert (host.name, host.port) == ("sink.test", 2626)
    assert ("127.0.0.1", "127.0.0.1", "") in [(a.address, a.source, a.problem) for a in host.addresses]


async def test_explain_says_that_a_private_address_is_refused(desk: Desk) -> None:
    explained = await explain(desk, "example.com")
    assert explained.address == "postmaster@example.com"
    (address,) = explained.hosts[0].addresses
    assert address.source == ""
    assert "allow_private_addresses" in address.problem


async def test_explain_shows_why_there_is_no_route(desk: Desk) -> None:
    outcome = Outcome(Verdict.BOUNCED, Reply(556, "1.10", "no mail"), Scope.DOMAIN, local=True)
    desk.router.answers["null.example"] = Unroutable("default", "null.example", outcome, 0.0)
    explained = await explain(desk, "a@null.example")
    assert (explained.verdict, explained.unroutable) == ("bounced", "556 5.1.10 no mail")
    assert explained.hosts == ()


async def test_explain_names_the_command_for_a_message(desk: Desk) -> None:
    """It explained mail to postmaster at a domain of that name."""
    with pytest.raises(ControlError, match="zonerelay queue show 1a22456f00a00000"):
        await explain(desk, "1a22456f00a00000")


async def test_explain_knows_suspensions(desk: Desk) -> None:
    desk.router.answers["busy.example"] = Route(
        "default", "busy.example", (MxHost("127.0.0.1", 25, literal=True), MxHost("mx.busy", 25)), 1e12
    )
    explained = await explain(desk, "a@busy.example")
    assert (explained.suspended_until, explained.suspended_reply) == (99.0, "421 busy")


@pytest.mark.parametrize(
    "address", ["", "<>", "x" * 600, "ann@", "@b.example", "a b@c.example", "a@b.example, c@d.example"]
)
async def test_explain_refuses_what_is_no_address(desk: Desk, address: str) -> None:
    with pytest.raises(ControlError, match="not an address"):
        await explain(desk, address)
