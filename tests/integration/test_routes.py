"""Routes, the zone header and priorities in a running relay: the zone that mail takes, who gives a priority,
what it changes, and what the operator is told.
"""

import asyncio
import ipaddress
import smtplib
import ssl
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.certificates import DAY, Made, make
from tests.support.credentials import file_of, user
from tests.support.relay import LOOPBACK, Running, relay_with, settings
from tests.support.sink import Sink
from tests.support.tls_client import trusting
from zonerelay.cli.operate.queue import zone_of
from zonerelay.config import settings as tables
from zonerelay.config.settings import ListenerSettings, RetrySettings, RouteSettings, Settings, ZoneSettings
from zonerelay.model.envelope import Priority
from zonerelay.operations import requests
from zonerelay.operations.answers import ChangeResult, DeliveryRow, Explanation, MessageDetail, OrderResult
from zonerelay.operations.errors import ControlError
from zonerelay.store.contract import StoreError
from zonerelay.telemetry.events.records import TraceStep

MESSAGE = b"From: app@example.org\r\nSubject: x\r\n\r\nhello\r\n"
HERE = (ipaddress.ip_network("127.0.0.0/8"),)
WITH_USERS = {"auth": tables.ListenerAuth.OPTIONAL, "unsafe": (tables.UnsafeListener.CLEARTEXT_AUTH,)}
STANDSTILL = RetrySettings(schedule=(3600.0,), suspend_min=3000.0, suspend_max=3600.0)


def bulk(**conditions: object) -> RouteSettings:
    return RouteSettings(zone="bulk", **conditions)  # type: ignore[arg-type]  # options by name


def listener(**options: object) -> ListenerSettings:
    return ListenerSettings(address=f"{LOOPBACK}:0", **options)  # type: ignore[arg-type]  # options by name


def standing_still(
    directory: Path, *routes: RouteSettings, listener: ListenerSettings | None = None
) -> Settings:
    """Nobody listens where its zones deliver to: mail stays and can be looked at."""
    zones = [ZoneSettings(name=name, next_hop=f"{LOOPBACK}:1") for name in ("default", "bulk", "vip")]
    (directory / "credentials").write_text(file_of(replace(user("app"), priority=Priority.BULK)))
    auth = tables.AuthSettings(credentials=directory / "credentials")
    return settings(directory, zone=zones, route=routes, listener=listener, retry=STANDSTILL, auth=auth)


async def zones_of(running: Running) -> dict[str, str]:
    return {each.recipient: each.zone async for each in running.worker.store.scan()}


async def traced(running: Running) -> list[str]:
    """The notes of the latest message's acceptance that tell of zones."""
    message_id = str(running.log.named("accepted")[-1]["id"])
    steps = await running.rows(requests.QueueTrace(message_id=message_id), TraceStep)
    return [step.text for step in steps if step.text.startswith("zone=")]


async def test_each_recipient_takes_the_first_route_that_matches(tmp_path: Path) -> None:
    routes = (
        bulk(recipient=("*.example.net",), listener=(f"{LOOPBACK}:0",), client=HERE),
        replace(bulk(sender=("bounce-*@example.org",), max_size=10_000), zone="vip"),
        bulk(listener=(f"{LOOPBACK}:25",)),
    )
    async with relay_with(standing_still(tmp_path, *routes)) as running:
        await running.send("bounce-1@example.org", ["a@x.example.net", "b@example.com"], MESSAGE)
        assert await zones_of(running) == {"a@x.example.net": "bulk", "b@example.com": "vip"}
        why = "listener matches 127.0.0.1:0 and client matches 127.0.0.1 and recipient matches *.example.net"
        assert await traced(running) == [
            f"zone=bulk route=1 {why}: a@x.example.net",
            f"zone=vip route=2 max_size matches {len(MESSAGE)} bytes and "
            "sender matches bounce-*@example.org: b@example.com",
        ]
        await running.send("bounce-1@example.org", ["c@example.com"], MESSAGE + b"x" * 10_000)
        assert (await zones_of(running))["c@example.com"] == "default"
        assert await traced(running) == ["zone=default no route"]


async def test_routes_change_live_and_wrong_ones_leave_those_that_were(tmp_path: Path) -> None:
    start = standing_still(tmp_path, bulk(recipient=("a@example.com",)))
    async with relay_with(start) as running:
        await running.worker.reload(replace(start, route=(bulk(recipient=("b@example.com",)),)))
        await running.send("a@example.org", ["a@example.com", "b@example.com"], MESSAGE)
        assert await zones_of(running) == {"a@example.com": "default", "b@example.com": "bulk"}
        await running.worker.reload(replace(start, route=(bulk(recipient=("c@-x-",)),)))
        assert running.worker.problems == (
            "the last reload was refused, so the previous configuration "
            'stays active: route[0]: "-x-" cannot be matched: not a domain name',
        )
        await running.send("a@example.org", ["<b@EXAMPLE.com>"], MESSAGE)
        assert (await zones_of(running))["b@EXAMPLE.com"] == "bulk"


async def test_a_report_of_our_own_goes_by_the_routes_for_the_null_sender(tmp_path: Path, sink: Sink) -> None:
    there = f"{LOOPBACK}:{sink.port}"
    zones = [ZoneSettings(next_hop=there), ZoneSettings(name="bulk", next_hop=there)]
    route = bulk(sender=("<>",), header=("Auto-Submitted: auto-replied",), min_size=500)
    async with relay_with(settings(tmp_path, zone=zones, route=[route])) as running:
        await running.send("app@example.org", ["reject-550@example.com"], MESSAGE)
        await running.until_logged("delivered")
        assert [fields["zone"] for fields in running.log.named("bounced")] == ["default"]
        assert [fields["zone"] for fields in running.log.named("delivered")] == ["bulk"]


# ---- the zone header ------------------------------------------------------------------------------

FIELD = b"x-sending-ZONE: "
OTHERS = (ipaddress.ip_network("192.0.2.0/24"),)


async def submitted(
    running: Running, zone: bytes, *, login: bool = False, recipient: str = "b@example.com"
) -> dict[str, str]:
    def submit() -> None:
        with smtplib.SMTP(*running.address, timeout=20) as client:
            if login:
                client.login("app", "correct horse")
            client.sendmail("a@example.org", [recipient], FIELD + zone + b"\r\n" + MESSAGE)

    await asyncio.to_thread(submit)
    return await zones_of(running)


async def body_of(running: Running) -> bytes:
    store = running.worker.store
    (delivery,) = [each async for each in store.scan()]
    return b"".join([chunk async for chunk in store.read_body(delivery.message_id)])


async def stored(running: Running) -> bytes:
    """The body of the only message, in whose header the field of the zone is not."""
    (delivery,) = [each async for each in running.worker.store.scan()]
    message = await running.worker.store.read_message(delivery.message_id)
    assert "x-sending-zone" not in {name.lower() for name, _ in message.headers}
    return await body_of(running)


TRUSTED: dict[str, tuple[dict[str, object], bytes, str, str]] = {
    "trusted": ({"zone_header_networks": HERE}, b"vip", "vip", "zone=vip zone-header"),
    "folded": ({"zone_header_networks": HERE}, b" vip\r\n ", "vip", "zone=vip zone-header"),
    "unknown zone": (
        {"zone_header_networks": HERE},
        b"nope",
        "bulk",
        'zone=bulk the zone header contains an unknown zone: "nope"; route=1 client matches',
    ),
    "empty": ({"zone_header_networks": HERE}, b"", "bulk", "zone=bulk route=1"),
    "another network": ({"zone_header_networks": OTHERS}, b"vip", "bulk", "zone=bulk route=1"),
    "nobody is trusted": ({}, b"vip", "bulk", "zone=bulk route=1"),
    "a user": ({"zone_header_users": ("app",), **WITH_USERS}, b"vip", "vip", "zone=vip zone-header"),
    "every user": ({"zone_header_users": ("*",), **WITH_USERS}, b"vip", "vip", "zone=vip zone-header"),
    "another user": ({"zone_header_users": ("crm",), **WITH_USERS}, b"vip", "bulk", "zone=bulk route=1"),
    "without a log-in": ({"zone_header_users": ("*",)}, b"vip", "bulk", "zone=bulk route=1"),
}


@pytest.mark.parametrize("who", TRUSTED)
async def test_the_field_counts_of_trusted_clients_and_is_always_removed(tmp_path: Path, who: str) -> None:
    """No route sees the field of a client that is not trusted, nor one that names no zone."""
    options, zone, expected, note = TRUSTED[who]
    here = listener(zone_header="X-Sending-Zone", **options)
    routes = (bulk(client=HERE), replace(bulk(header=("X-Sending-Zone",)), zone="default"))
    async with relay_with(standing_still(tmp_path, *routes, listener=here)) as running:
        assert await submitted(running, zone, login="auth" in options) == {"b@example.com": expected}
        (said,) = await traced(running)
        assert said.startswith(note)
        body = await stored(running)
        assert b"sending-zone" not in body.lower()
        assert body.endswith(MESSAGE)


async def test_without_the_option_the_field_is_one_like_any_other(tmp_path: Path) -> None:
    async with relay_with(standing_still(tmp_path)) as running:
        assert await submitted(running, b"vip") == {"b@example.com": "default"}
        assert await traced(running) == []
        assert FIELD + b"vip\r\n" in await body_of(running)


# ---- explain --------------------------------------------------------------------------------------


async def test_explain_knows_all_that_routes_look_at(tmp_path: Path) -> None:
    here = listener(zone_header="X-Sending-Zone", zone_header_networks=HERE)
    routes = (
        bulk(user=("app",), min_size=1000),
        replace(bulk(listener=(here.address,), header=("X-Stream: news",)), zone="vip"),
        bulk(client=HERE, certificate=("ab" * 32,)),
    )
    async with relay_with(standing_still(tmp_path, *routes, listener=here)) as running:
        assert running.log.named("trouble") == []
        nothing = await running.explain()
        assert (nothing.zone, nothing.rule, nothing.reason) == ("default", 0, "no route matches")
        assert [each.unmatched for each in nothing.routes] == [
            ("user", "min_size"),
            ("listener", "header"),
            ("certificate", "client"),
        ]
        large = await running.explain(user="app", size=1000)
        assert (large.zone, large.rule, [each.matches for each in large.routes]) == ("bulk", 1, [True])
        news = await running.explain(listener=here.address, headers=(("X-Stream", "News"),))
        assert (news.zone, news.rule) == ("vip", 2)
        shown = await running.explain(client=LOOPBACK, certificate="ab" * 32)
        assert shown.rule == 3
        field = (("X-Sending-Zone", "vip"),)
        named = await running.explain(listener=here.address, client=LOOPBACK, headers=field)
        assert (named.zone, named.rule, named.reason) == ("vip", 0, "the zone was chosen by the zone header")
        ignored = await running.explain(listener=here.address, client="192.0.2.1", headers=field)
        assert ignored.zone == "default"


async def test_a_listeners_priority_is_its_mails_and_explain_knows_it(tmp_path: Path) -> None:
    here = listener(priority=Priority.BULK)
    chosen = standing_still(tmp_path, bulk(priority=("bulk",)), bulk(priority=("high",)), listener=here)
    async with relay_with(chosen) as running:
        await running.send("app@example.org", ["b@example.com"], MESSAGE)
        assert await traced(running) == ["zone=bulk route=1 priority matches bulk"]
        there = await running.explain(listener=here.address)
        assert (there.zone, there.rule, there.reason) == ("bulk", 1, "priority matches bulk")
        urgent = await running.explain(listener=here.address, priority="high")
        assert (urgent.rule, urgent.reason) == (2, "priority matches high")
        assert (await running.explain()).zone == "default"


async def test_explain_refuses_a_listener_that_is_not_there(tmp_path: Path) -> None:
    async with relay_with(standing_still(tmp_path)) as running:
        with pytest.raises(ControlError, match=r"no listener has the address .*; did you mean 127.0.0.1:0\?"):
            await running.explain(listener="127.0.0.1:1")
        with pytest.raises(ControlError, match="--listener: "):
            await running.explain(listener="nonsense")


# ---- certificates ---------------------------------------------------------------------------------


def made(name: str) -> Made:
    return make(name, starts=time.time() - DAY, ends=time.time() + 90 * DAY)


async def test_a_route_knows_the_certificate_that_a_client_shows(tmp_path: Path) -> None:
    client = made("client.test")
    certificate, key = made("relay.test").write(tmp_path, "relay")
    shown = client.write(tmp_path, "client")
    here = listener(
        tls=tables.ListenerTls.STARTTLS,
        certificate=(certificate,),
        key=(key,),
        allow_certificates=("cd" * 32,),
    )
    route = bulk(certificate=(client.fingerprint,))
    async with relay_with(standing_still(tmp_path, route, listener=here)) as running:

        def submit(recipient: str, context: ssl.SSLContext) -> None:
            with smtplib.SMTP(*running.address, timeout=20) as smtp:
                smtp.starttls(context=context)
                smtp.sendmail("a@example.org", [recipient], MESSAGE)

        presenting = trusting()
        presenting.load_cert_chain(*shown)
        await asyncio.to_thread(submit, "a@example.com", presenting)
        (note,) = await traced(running)
        assert note == f"zone=bulk route=1 certificate matches {client.fingerprint}"
        await asyncio.to_thread(submit, "b@example.com", trusting())
        assert await zones_of(running) == {"a@example.com": "bulk", "b@example.com": "default"}


# ---- mail that waits ------------------------------------------------------------------------------


async def test_show_and_explain_agree_on_where_waiting_mail_goes_and_what_is_new(tmp_path: Path) -> None:
    before = standing_still(tmp_path, bulk(recipient_domain=("example.com",)))
    async with relay_with(before) as running:
        await running.send("app@example.org", ["b@example.com", "c@example.net"], MESSAGE)
        await running.until_logged(
            "deferred", 2
        )  # an attempt between two looks would change what is compared
        message_id = str((await running.until_logged("accepted"))[0]["id"])

        async def rows() -> dict[str, DeliveryRow]:
            detail = await running.ask(requests.QueueShow(message_id=message_id), MessageDetail)
            return {row.recipient: row for row in detail.deliveries}

        async def plans(address: str = "") -> dict[str, Explanation]:
            request = requests.QueueExplain(message_id=message_id, address=address)
            return {each.address: each for each in await running.rows(request, Explanation)}

        assert {name: row.new_zone for name, row in (await rows()).items()} == dict.fromkeys(await rows(), "")
        after = replace(before, route=(RouteSettings(recipient_domain=("example.com",), zone="vip"),))
        await running.worker.reload(after)
        waiting, explained = await rows(), await plans()
        assert {name: plan.queued for name, plan in explained.items()} == waiting
        assert {name: plan.zone for name, plan in explained.items()} == await zones_of(running)
        moved = waiting["b@example.com"]
        assert (moved.zone, moved.new_zone) == ("bulk", "vip")
        assert moved.routed.startswith("route=1 recipient_domain")
        assert moved.new_why.startswith("route=1 recipient_domain")
        assert waiting["c@example.net"].new_zone == ""
        assert "would go to zone vip" in str(zone_of(moved))
        assert list(await plans(address="C@example.net")) == ["c@example.net"]
        with pytest.raises(ControlError, match="no open delivery to d@"):
            await plans(address="d@example.net")
        # A zone that went with the reload keeps its mail, and no other zone's plan is shown for it.
        await running.worker.reload(
            replace(after, zone=tuple(each for each in after.zone if each.name != "bulk"))
        )
        gone = (await plans())["b@example.com"]
        assert (gone.zone, gone.verdict) == ("bulk", "deferred")
        assert "zone bulk is no longer configured" in gone.unroutable


async def test_a_reload_that_the_store_hinders_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = standing_still(tmp_path)
    async with relay_with(before) as running:
        worker = running.worker

        async def look_for_events(settings: Settings) -> None:
            raise StoreError("the database does not answer")

        monkeypatch.setattr(worker, "configure_webhooks", look_for_events)
        after = replace(
            before, zone=before.zone[:1], destination=(tables.DestinationSettings(max_connections=1),)
        )
        assert await worker.reload(after) == "the database does not answer"
        assert worker.zones.names == ("default", "bulk", "vip")
        assert worker.sending.router.destinations is worker.tables.destinations


async def test_a_zone_that_a_header_named_is_not_compared(tmp_path: Path) -> None:
    here = listener(zone_header="X-Sending-Zone", zone_header_networks=HERE)
    async with relay_with(standing_still(tmp_path, listener=here)) as running:
        await running.send("app@example.org", ["b@example.com"], b"X-Sending-Zone: vip\r\n" + MESSAGE)
        message_id = str((await running.until_logged("accepted"))[0]["id"])
        detail = await running.ask(requests.QueueShow(message_id=message_id), MessageDetail)
        [row] = detail.deliveries
        assert (row.zone, row.routed, row.new_zone) == ("vip", "zone-header", "")


async def test_explain_of_waiting_mail_knows_the_order_about_its_user(tmp_path: Path) -> None:
    async with relay_with(standing_still(tmp_path, listener=listener(**WITH_USERS))) as running:
        await submitted(running, b"", login=True)
        message_id = str((await running.until_logged("accepted"))[0]["id"])
        order = await running.ask(
            requests.Suspend(about=requests.Selectors(user="app"), reason="a leak"), OrderResult
        )
        found = await running.ask(requests.QueueExplain(message_id=message_id), Explanation)
        assert [each.id for each in found.orders] == [order.order.id]


# ---- priorities -----------------------------------------------------------------------------------

PRIORITIZED = b"X-Priority: 1\r\nMT-Priority: 9\r\n" + MESSAGE


async def priorities(running: Running) -> dict[str, Priority]:
    return {each.recipient: each.priority async for each in running.worker.store.scan()}


async def listed(running: Running, **wanted: str) -> list[tuple[str, str, str]]:
    rows = await running.rows(requests.QueueList(filter=requests.Filter(**wanted)), DeliveryRow)  # type: ignore[arg-type]  # by name
    return [(row.recipient, row.zone, row.priority) for row in rows]


@pytest.mark.parametrize(
    ("login", "recipient", "expected"),
    [
        (False, "b@example.com", Priority.HIGH),
        (True, "b@example.com", Priority.BULK),
        (True, "b@example.net", Priority.NORMAL),
    ],
    ids=["the listener's", "the user's before the listener's", "the route's before all"],
)
async def test_who_gives_a_priority(tmp_path: Path, login: bool, recipient: str, expected: Priority) -> None:
    here = listener(priority=Priority.HIGH, **WITH_USERS)
    route = RouteSettings(recipient_domain=("example.net",), set_priority=Priority.NORMAL)
    async with relay_with(standing_still(tmp_path, route, listener=here)) as running:
        await submitted(running, b"", login=login, recipient=recipient)
        assert await priorities(running) == {recipient: expected}
        found = await running.explain(listener=f"{LOOPBACK}:0")
        assert found.priority == "high"


async def test_no_header_gives_mail_a_priority(tmp_path: Path) -> None:
    async with relay_with(standing_still(tmp_path)) as running:
        await running.send("a@example.org", ["b@example.com"], PRIORITIZED)
        assert await priorities(running) == {"b@example.com": Priority.NORMAL}


async def test_operators_see_one_zone_and_find_mail_by_priority_also_after_a_restart(tmp_path: Path) -> None:
    route = RouteSettings(recipient_domain=("news.example",), set_priority=Priority.BULK)
    chosen = standing_still(tmp_path, route)
    async with relay_with(chosen) as running:
        await running.send("a@example.org", ["b@example.com", "c@news.example"], MESSAGE)
        await running.until_logged("deferred", 2)
    async with relay_with(chosen) as running:
        assert await listed(running, zone="default") == [
            ("b@example.com", "default", "normal"),
            ("c@news.example", "default", "bulk"),
        ]
        assert await listed(running, priority="bulk") == [("c@news.example", "default", "bulk")]
        status = await running.status()
        assert {each.name: each.deferred for each in status.zones} == {"default": 2, "bulk": 0, "vip": 0}
        await running.ask(requests.Hold(filter=requests.Filter(priority=Priority.BULK)), ChangeResult)
        status = await running.status()
        assert [(each.deferred, each.held) for each in status.zones if each.name == "default"] == [(1, 1)]


async def test_deferred_mail_of_every_priority_comes_due(tmp_path: Path) -> None:
    seen: set[str] = set()

    def later(verb: str, argument: str) -> str | None:
        if verb != "RCPT" or argument in seen:
            return None
        seen.add(argument)
        return "450 4.2.0 later"

    async with Sink(script=later) as sink:
        routes = [RouteSettings(recipient=(f"{each}@example.com",), set_priority=each) for each in Priority]
        chosen = settings(
            tmp_path,
            zone=ZoneSettings(next_hop=f"{LOOPBACK}:{sink.port}"),
            route=routes,
            retry=RetrySettings(schedule=(0.3,)),
        )
        async with relay_with(chosen) as running:
            await running.send("a@example.org", [f"{each}@example.com" for each in Priority], MESSAGE)
            await running.until_empty()
    assert len(seen) == 3
    delivered = sink.recipients()
    assert delivered == ["bulk@example.com", "high@example.com", "normal@example.com"]
