"""Orders of operators: mail waits for them, now and when it comes, and goes on when they are over."""

import asyncio
import errno
import fcntl
import os
import smtplib
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.dns import FakeDns
from tests.support.relay import LOOPBACK, Running, relay_with, settings
from tests.support.sink import Sink
from zonerelay import durable
from zonerelay.config.settings import RetrySettings, RouteSettings, Settings, ZoneSettings
from zonerelay.model.delivery import DeliveryState
from zonerelay.operations import answers, requests
from zonerelay.operations.answers import ChangeResult, OrderResult, OrderRow
from zonerelay.operations.errors import ControlError
from zonerelay.operations.requests import Filter, Orders, Resume, Selectors, Suspend
from zonerelay.process.setup import StartError
from zonerelay.queue.orders import orders as module
from zonerelay.queue.zone import window

MESSAGE = b"Subject: x\r\n\r\nbody\r\n"
NAMES = {
    "a.example": {"MX": ["10 mx.shared.example"]},
    "b.example": {"MX": ["10 mx.shared.example"]},
    "c.example": {"MX": ["10 mx.own.example"]},
    "mx.shared.example": {"A": [LOOPBACK]},
    "mx.own.example": {"A": [LOOPBACK]},
}


@dataclass(slots=True)
class Stage:
    sink: Sink
    chosen: Settings

    def delivered(self) -> list[str]:
        return self.sink.recipients()


@asynccontextmanager
async def staged(directory: Path, *, retry: RetrySettings | None = None) -> AsyncIterator[Stage]:
    """A zone by MX, and one with a next hop for mail to hop.example."""
    async with FakeDns(NAMES) as dns, Sink() as sink:
        zones = (
            ZoneSettings(port=sink.port, allow_private_addresses=True),
            ZoneSettings(name="hop", next_hop=f"{LOOPBACK}:{sink.port}"),
        )
        chosen = settings(
            directory,
            zone=zones,
            route=[RouteSettings(zone="hop", recipient_domain=("hop.example", "other.example"))],
            dns=dns.address,
        )
        if retry is not None:
            chosen = replace(chosen, retry=retry)
        yield Stage(sink, chosen)


async def suspend(
    running: Running, /, why: str = "a test", **named: Any
) -> OrderResult:  # Any: fields by name
    options = {name: named.pop(name) for name in list(named) if name in Suspend.__struct_fields__}
    return await running.ask(Suspend(about=Selectors(**named), reason=why, **options), OrderResult)


async def resume(
    running: Running, /, id: str = "", **named: Any
) -> answers.OrdersResult:  # Any: fields by name
    return await running.ask(Resume(about=Selectors(**named), id=id), answers.OrdersResult)


async def send(running: Running, *recipients: str, sender: str = "app@example.org") -> None:
    for recipient in recipients:
        await running.send(sender, [recipient], MESSAGE)


ABOUT = [
    ({"zone": "default"}, ["1@a.example"], "1@hop.example"),
    ({"zone": "hop"}, ["1@hop.example"], "1@a.example"),
    ({"destination": "mx.shared.example"}, ["1@a.example", "1@b.example"], "1@c.example"),
    ({"destination": LOOPBACK}, ["1@hop.example", "1@other.example"], "1@c.example"),
    ({"domain": "a.*"}, ["1@a.example"], "1@b.example"),
    ({"domain": "hop.example"}, ["1@hop.example"], "1@other.example"),
    ({"recipient": "1@*"}, ["1@a.example", "1@hop.example"], "2@a.example"),
    ({"zone": "hop", "effect": "hold"}, ["1@hop.example"], "1@a.example"),
]


@pytest.mark.parametrize(("about", "kept", "other"), ABOUT, ids=[str(each[0]) for each in ABOUT])
async def test_suspended_mail_waits_over_a_restart_until_it_is_resumed(
    tmp_path: Path, about: dict[str, Any], kept: list[str], other: str
) -> None:
    """Mail that came before the order, and mail that comes later, while other mail leaves."""
    async with staged(tmp_path) as stage:
        async with relay_with(stage.chosen) as running:
            assert (await suspend(running, "all", everything=True)).new
            await send(running, *kept, other)
            given = await suspend(running, **about)
            assert (await resume(running, everything=True)).released == 0
            await send(running, *kept, other)
            await running.until_logged("delivered", 2)
        async with relay_with(stage.chosen) as running:
            await send(running, *kept, other)
            await running.until_logged("delivered", 1)
            await running.until(lambda: running.queued() == 3 * len(kept), what="the others are gone")
            assert stage.delivered() == [other] * 3
            status = await running.status()
            assert [(row.id, row.reason) for row in status.orders] == [(given.order.id, "a test")]
            found = await running.explain(kept[0])
            assert [row.id for row in found.orders] == [given.order.id]
            ended = await resume(running, **{k: v for k, v in about.items() if k != "effect"})
            assert [row.id for row in ended.orders] == [given.order.id]
            await running.until_empty()
        assert stage.delivered() == sorted([*kept * 3, *[other] * 3])


async def test_a_resumed_sender_gets_what_the_order_held_and_no_more(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage, relay_with(stage.chosen) as running:
        given = await suspend(running, sender="news@example.org")
        again = await suspend(running, "another reason", sender="news@example.org", seconds=3600)
        assert not again.new
        assert (again.order.id, again.order.reason) == (given.order.id, "another reason")
        await send(running, "1@a.example", "2@a.example", sender="news@example.org")
        await send(running, "3@a.example")
        await running.until_logged("held", 2)
        await running.until_logged("delivered", 1)
        found = await running.ask(
            requests.QueueShow(message_id=str(running.log.named("held")[0]["id"])), answers.MessageDetail
        )
        assert [row.order for row in found.deliveries] == [given.order.id]
        assert [row.reason for row in found.orders] == ["another reason"]
        # One of them an operator holds, too.
        held = await running.ask(requests.Hold(filter=Filter(recipient="2@*")), ChangeResult)
        assert held.changed == 1
        assert (await resume(running, id=given.order.id)).released == 1
        await running.until_logged("delivered", 2)
        await running.until(lambda: running.queued() == 1, what="one is left")
        assert (await resume(running, id=given.order.id)).orders == ()
        assert [each["reason"] for each in running.log.named("order-ended")] == ["another reason"]
        await running.ask(requests.Release(everything=True), ChangeResult)
        await running.until_empty()


async def test_an_order_is_an_act_that_can_be_undone(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage, relay_with(stage.chosen) as running:
        given = await suspend(running, sender="s@x.example")
        await send(running, "x@hop.example", sender="s@x.example")
        await running.until_logged("held")
        undone = await running.ask(requests.Undo(undoes=given.order.id), ChangeResult)
        assert (undone.changed, undone.note) == (1, "the suspension or hold rule has ended")
        await running.until_empty()
        assert stage.delivered() == ["x@hop.example"]


async def test_an_order_ends_by_itself_also_while_the_relay_is_down(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        async with relay_with(stage.chosen) as running:
            await suspend(running, domain="a.example", seconds=0.3)
            await suspend(running, sender="app@*", seconds=0.3)
            await send(running, "1@a.example", "2@c.example")
            await running.until_logged("order-expired", 2)
            await running.until_empty()
            await suspend(running, everything=True, seconds=0.5)
            await suspend(running, sender="news@*", seconds=1)
            await send(running, "3@a.example")
            await resume(running, everything=True)
            await suspend(running, recipient="4@*", seconds=2)
            await send(running, "4@a.example")
        await asyncio.sleep(1.0)
        async with relay_with(stage.chosen) as running:
            await running.until_empty()
            assert running.log.named("order-expired")
        assert stage.delivered() == ["1@a.example", "2@c.example", "3@a.example", "4@a.example"]


async def test_a_client_is_refused_without_a_reason(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage, relay_with(stage.chosen) as running:
        await suspend(running, "we owe them money", sender="bad@example.org", refuse=True)
        await suspend(running, domain="b.example", refuse=True)
        await suspend(running, zone="hop", refuse=True)

        def refused(sender: str, recipient: str) -> str:
            with smtplib.SMTP(*running.address) as client:
                client.ehlo()
                code, text = client.mail(sender)
                if code == 250:
                    code, text = client.rcpt(recipient)
            return f"{code} {text.decode()}"

        answer = "421 4.3.2 Service not available, try again later"
        ask = asyncio.to_thread
        assert await ask(refused, "bad@example.org", "a@a.example") == answer
        assert await ask(refused, "good@example.org", "a@b.example") == answer
        assert await ask(refused, "good@example.org", "a@hop.example") == answer
        assert (await ask(refused, "good@example.org", "a@a.example")).startswith("250")
        assert [each["reason"] for each in running.log.named("refused")] == ["suspended"] * 3
        found = await running.rows(Orders(), OrderRow)
        assert [row.refused for row in found] == [1, 1, 1]
        await suspend(running, everything=True, refuse=True)
        assert await ask(refused, "good@example.org", "a@a.example") == answer


async def test_suspended_mail_does_not_expire_unseen(tmp_path: Path) -> None:
    """It has one attempt after the end at least, and all the time that it had, if its clock was stopped."""
    retry = RetrySettings(schedule=(0.05,), jitter=0.0, max_age=2.0)
    kept: list[tuple[dict[str, Any], bool, str]] = [
        ({"domain": "a.example"}, True, "defer-451@a.example"),
        ({"domain": "b.example"}, False, "defer-451@b.example"),
        ({"sender": "stopped@example.org"}, True, "defer-451@c.example"),
        ({"sender": "running@example.org"}, False, "defer-452@c.example"),
    ]
    async with staged(tmp_path, retry=retry) as stage, relay_with(stage.chosen) as running:
        for about, stop, recipient in kept:
            given = await suspend(running, stop_clock=stop, **about)
            assert given.first_expiry is None
            began = time.time()
            await send(running, recipient, sender=about.get("sender", "app@example.org"))
            again = await suspend(running, stop_clock=stop, **about)
            assert again.first_expiry is not None
            assert began <= again.first_expiry - 2.0 <= time.time()
        await asyncio.sleep(2.5)
        assert running.queued() == len(kept)
        assert not running.log.named("expired")
        for about, _, _ in kept:
            await resume(running, **about)
        await running.until_logged("expired", len(kept))
        tried = Counter(each["recipient"] for each in running.log.named("deferred"))
        assert [tried[recipient] > 5 for _, _, recipient in kept] == [stop for _, stop, _ in kept]


async def test_suspended_mail_does_not_bounce_for_its_destination(tmp_path: Path) -> None:
    """Its domain does not exist: without the order it would be returned without an attempt."""
    async with staged(tmp_path, retry=RetrySettings()) as stage, relay_with(stage.chosen) as running:
        await suspend(running, sender="app@*")
        await send(running, "1@no.such.example")
        await running.until_logged("held", 1)
        expiry = (await suspend(running, sender="app@*")).first_expiry
        assert expiry is not None
        assert expiry > time.time() + 4 * 86400, "only reports (<>) expire after a day"
        settler = running.worker.settler
        assert settler is not None
        assert settler.outcome_log._unsettled == 0, "what is held is no more on its way"
        assert (await resume(running, sender="app@*")).released == 1
        await running.until_logged("bounced", 1)


async def test_domains_beyond_the_limit_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "MAX_PASSED_OVER", 1)
    async with staged(tmp_path) as stage, relay_with(stage.chosen) as running:
        await suspend(running, domain="*.example", zone="default")
        await send(running, "1@a.example", "1@b.example", "1@c.example", "2@a.example")
        await running.until_logged("held", 2)
        assert running.queued() == 4
        assert (await resume(running, domain="*.example", zone="default")).released == 2
        await running.until_empty()
        assert stage.delivered() == ["1@a.example", "1@b.example", "1@c.example", "2@a.example"]


async def test_a_hold_rule_lets_released_mail_pass(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage, relay_with(stage.chosen) as running:
        await suspend(running, effect="hold", domain="*.example")
        await send(running, "1@a.example", "2@a.example")
        await running.until_logged("held", 2)
        await running.ask(requests.Release(filter=Filter(recipient="1@*")), ChangeResult)
        await running.until_logged("delivered", 1)
        assert (await resume(running, domain="*.example")).released == 1
        await running.until_empty()


async def test_operators_at_the_same_time_do_not_undo_each_other(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage, relay_with(stage.chosen) as running:
        names = [f"{number}.example" for number in range(6)]

        async def operator(order: Sequence[str]) -> set[str]:
            given = {(await suspend(running, domain=name)).order.id for name in order}
            for name in order[1:-1]:
                await resume(running, domain=name)
            return given

        # Two, for they share the threads of this process with the relay.
        await asyncio.gather(operator(names), operator(names))
        left = await running.rows(Orders(), OrderRow)
        assert sorted(row.domain or "" for row in left) == [names[0], names[-1]]
        given = len(running.log.named("order-given"))
        assert given == len(running.log.named("order-ended")) + 2


@pytest.mark.parametrize(
    "about",
    [
        {"zone": "default"},
        {"destination": "a.example"},
        {"domain": "a.example"},
        {"sender": "app@*"},
        {"user": ""},
        {"recipient": "*@a.example"},
        {"domain": "a.example", "effect": "hold"},
        {"zone": "default", "effect": "hold"},
    ],
    ids=str,
)
async def test_what_an_order_keeps_is_suspended_everywhere(tmp_path: Path, about: dict[str, str]) -> None:
    """Also what had been deferred; a summary by reply said "no attempt yet" of the others."""
    retry = RetrySettings(schedule=(3600.0,))
    async with staged(tmp_path, retry=retry) as stage, relay_with(stage.chosen) as running:
        await send(running, "defer-451@a.example")
        await running.until_logged("deferred", 1)
        await suspend(running, **about)
        await send(running, "1@a.example", "2@a.example")
        by_envelope = bool({"sender", "user", "recipient", "effect"} & about.keys())
        if by_envelope:  # it is held when it is due
            await running.until_logged("held", 2)
        (order,) = await running.rows(Orders(), OrderRow)
        status = await running.status()
        zone = next(each for each in status.zones if each.name == "default")
        (row,) = status.destinations
        for each in (zone, row):
            counted = (each.suspended, each.ready, each.deferred, each.held)
            assert counted == ((2, 0, 1, 0) if by_envelope else (3, 0, 0, 0))
        assert status.orders == (order,)
        for state in DeliveryState:
            rows = await running.rows(requests.QueueList(filter=Filter(state=state)), answers.DeliveryRow)
            kept = [("suspended", order.id)] * 3 if state is DeliveryState.SUSPENDED else []
            assert [(each.state, each.order) for each in rows] == kept
        (summary,) = await running.rows(requests.QueueSummary(by="reply"), answers.Summary)
        reply, waits = [(each.key, each.total) for each in sorted(summary.rows, key=lambda row: row.total)]
        assert (reply[0][:3], reply[1]) == ("451", 1)
        assert waits == (f"(suspended by {order.id})", 2)
        await resume(running, id=order.id)
        await running.until_logged("delivered", 2)


MISTAKES: list[tuple[Suspend | Resume, str]] = [
    (Suspend(about=Selectors(), reason="x"), "no mail selected"),
    (Suspend(about=Selectors(zone="defualt"), reason="x"), "did you mean default"),
    (Suspend(about=Selectors(zone="default"), reason=" "), "reason"),
    (Suspend(about=Selectors(zone="default", everything=True), reason="x"), "cannot be combined"),
    (Suspend(about=Selectors(destination="x"), refuse=True, reason="x"), "combined with a destination"),
    (Suspend(about=Selectors(domain="x"), seconds=0, reason="x"), "> 0"),
    (Resume(), "no suspension selected"),
]


async def test_a_mistake_gets_words(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage, relay_with(stage.chosen) as running:
        for wrong, words in MISTAKES:
            with pytest.raises(ControlError, match=words):
                await running.ask(wrong, OrderResult)
        assert (await running.status()).orders == ()


async def test_another_worker_finds_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two relays with one file, as workers have: one is not asked."""
    monkeypatch.setattr(module, "LOOK", 0.05)
    (tmp_path / "other").mkdir()
    async with staged(tmp_path) as stage:
        other = settings(tmp_path / "other", zone=stage.chosen.zone, route=stage.chosen.route)
        async with relay_with(stage.chosen) as running, relay_with(other) as untold:
            theirs = untold.worker.orders
            assert theirs is not None
            theirs._file = module.OrdersFile(tmp_path)
            await suspend(running, sender="app@*")
            await untold.until(lambda: bool(theirs.table.orders), what="it knows the order")
            await send(untold, "1@hop.example")
            await untold.until_logged("held", 1)
            await resume(running, sender="app@*")
            await untold.until_logged("delivered", 1)


@pytest.mark.parametrize("how", ["deleted", "damaged", "locked"])
async def test_a_file_in_trouble_is_a_problem_while_it_is_and_its_orders_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """When the file was deleted, mail that was suspended was sent."""
    monkeypatch.setattr(module, "LOOK", 0.05)
    monkeypatch.setattr(module, "PATIENCE", 0.1)
    file = tmp_path / "orders" / "orders.json"
    async with staged(tmp_path) as stage, relay_with(stage.chosen, trouble_expected=True) as running:

        async def problems() -> list[str]:
            return [each for each in (await running.status()).problems if str(file) in each]

        async def until(there: bool) -> None:
            async with asyncio.timeout(20):
                while bool(await problems()) is not there:
                    await asyncio.sleep(0.02)

        await suspend(running, zone="hop")
        assert await problems() == []
        kept = file.read_bytes()
        lock = os.open(file.parent, os.O_RDONLY)
        if how == "deleted":
            file.unlink()
        elif how == "damaged":
            file.write_text("[{")
        else:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(ControlError, match="another process has locked"):
                await suspend(running, sender="x@*")
        await until(there=True)
        await send(running, "1@hop.example")
        assert [row.state for row in await running.rows(requests.QueueList(), answers.DeliveryRow)] == [
            "suspended"
        ]
        os.close(lock)
        if how != "locked":
            file.write_bytes(kept)
        await until(there=False)
        if how == "deleted":
            file.unlink()
            await suspend(running, sender="x@*")
            assert len(module.OrdersFile(tmp_path).read()) == 2
        await resume(running, zone="hop")
        await running.until_logged("delivered", 1)


async def test_a_file_that_cannot_be_written_is_tried_again_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was tried, and logged, every five seconds."""
    monkeypatch.setattr(module, "LOOK", 0.01)
    monkeypatch.setattr(module, "LONGEST_PAUSE", 0.16)
    tries, write = list[float](), durable.write

    def fails(path: Path, data: bytes) -> None:
        if path.name != "orders.json":
            write(path, data)
            return
        tries.append(time.monotonic())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with staged(tmp_path) as stage, relay_with(stage.chosen, trouble_expected=True) as running:
        await suspend(running, zone="hop")
        monkeypatch.setattr(durable, "write", fails)
        with pytest.raises(ControlError, match="No space left"):
            await suspend(running, sender="x@*")
        await running.until(lambda: len(tries) == 8, what="it is tried again")
        assert tries[-1] - tries[-2] >= 0.16
        assert any("cannot be written" in each for each in (await running.status()).problems)
        monkeypatch.setattr(durable, "write", write)
        await suspend(running, sender="x@*")
        assert not any("cannot be written" in each for each in (await running.status()).problems)


async def test_mail_of_a_next_hop_that_is_not_known_yet_has_the_row_of_the_next_hop(tmp_path: Path) -> None:
    """It had the name of the first domain."""
    async with staged(tmp_path) as stage, relay_with(stage.chosen) as running:
        await suspend(running, domain="*.example")
        await send(running, "1@hop.example", "1@other.example")
        await running.until_logged("held", 2)
        (row,) = (await running.status()).destinations
        assert (row.destination, row.suspended) == (f"{LOOPBACK}:{stage.sink.port}", 2)


@pytest.mark.parametrize("content", [b"[{", b'[{"id": "\xff"}]'])
async def test_a_file_that_cannot_be_read_ends_the_start(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders" / "orders.json").write_bytes(content)
    with pytest.raises(StartError, match="suspensions of operators cannot be read"):
        async with staged(tmp_path) as stage, relay_with(stage.chosen):
            pass
