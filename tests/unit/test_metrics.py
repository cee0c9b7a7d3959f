"""Metrics and readiness: what is counted and shown, which reasons there are, and how the probe is shared."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import zonerelay
from zonerelay.inbound.limits.memory import SessionMemory
from zonerelay.model.clock import ManualClock
from zonerelay.store.contract import StoreError, StoreFullError
from zonerelay.telemetry.metrics.instruments import MAX_LABEL_VALUES, ZoneQueue, queue_figures
from zonerelay.telemetry.metrics.metrics import TROUBLES, Metrics
from zonerelay.worker.status import ReadinessCheck

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(metrics: Metrics) -> Samples:
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics).get((name, frozenset(labels.items())), 0.0)


def delivered_count(metrics: Metrics, outcome: str) -> float:
    return value(metrics, "zonerelay_deliveries_total", zone="default", outcome=outcome)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def test_acceptance_counts_messages_recipients_and_octets(metrics: Metrics) -> None:
    metrics.accepted(4096, 3)
    metrics.accepted(100, 1)
    assert value(metrics, "zonerelay_messages_accepted_total") == 2
    assert value(metrics, "zonerelay_recipients_accepted_total") == 4
    assert value(metrics, "zonerelay_accepted_bytes_total") == 4196


def test_every_outcome_has_its_counter_and_only_delivery_its_time(metrics: Metrics) -> None:
    for outcome in ("delivered", "deferred", "bounced", "expired"):
        metrics.settled("default", outcome, 0.2)
        assert delivered_count(metrics, outcome) == 1
    assert value(metrics, "zonerelay_delivery_seconds_count") == 1
    assert value(metrics, "zonerelay_delivery_seconds_bucket", le="0.1") == 0
    assert value(metrics, "zonerelay_delivery_seconds_bucket", le="0.25") == 1


def test_replies_count_for_the_receiver_whose_host_gave_them(metrics: Metrics) -> None:
    for host, code, site, kind in (
        ("aspmx.l.google.com", 250, "google", "2xx"),
        ("example-com.mail.protection.outlook.com", 451, "microsoft", "4xx"),
        ("example-com.a-v1.mx.microsoft", 550, "microsoft", "5xx"),
        ("mta5.am0.yahoodns.net", 421, "yahoo", "4xx"),
        ("mx01.mail.icloud.com", 554, "apple", "5xx"),
        ("google.com.attacker.example", 250, "other", "2xx"),
        ("localhost", 0, "other", "none"),
    ):
        before = value(metrics, "zonerelay_replies_total", **{"site": site, "class": kind})
        metrics.replied(host, code)
        assert value(metrics, "zonerelay_replies_total", **{"site": site, "class": kind}) == before + 1
    everything = [key for key in samples(metrics) if key[0] == "zonerelay_replies_total"]
    assert len(everything) == 32  # whatever hosts there are


@pytest.mark.parametrize(("outcome", "is_end"), [("deferred", False), ("bounced", True)])
def test_what_is_in_doubt_counts_so_and_as_an_end(outcome: str, is_end: bool, metrics: Metrics) -> None:
    metrics.settled("default", outcome, 1.0, in_doubt=True)
    assert (delivered_count(metrics, "in_doubt"), delivered_count(metrics, outcome)) == (1, is_end)


def test_a_clock_that_was_set_back_does_not_make_time_negative(metrics: Metrics) -> None:
    metrics.settled("default", "delivered", -5.0)
    assert value(metrics, "zonerelay_delivery_seconds_sum") == 0


def test_the_queue_is_asked_at_scrape_time(metrics: Metrics) -> None:
    queue = [ZoneQueue("default", 1, 2, 3, 4, 5.5, 6)]
    metrics.read(lambda: queue_figures(queue, is_counted=True))
    states = ("ready", "active", "deferred", "held")
    counts = [value(metrics, "zonerelay_queue_deliveries", zone="default", state=each) for each in states]
    assert counts == [1, 2, 3, 4]
    assert value(metrics, "zonerelay_outbound_connections", zone="default") == 6
    queue[0] = ZoneQueue("default", 0, 0, 0, 0, 0.0)
    assert value(metrics, "zonerelay_queue_oldest_seconds", zone="default") == 0


def test_gauges_are_read_at_scrape_time() -> None:
    metrics, memory = Metrics(), SessionMemory(1_000_000)
    metrics.read(lambda: {"zonerelay_inbound_memory_bytes": memory.total})
    for used in (4711, 4000):
        memory.used = used
        assert value(metrics, "zonerelay_inbound_memory_bytes") == used
    metrics.inbound.value += 2
    metrics.inbound.value -= 1
    assert value(metrics, "zonerelay_inbound_connections") == 1


def test_label_values_are_bounded_and_the_rest_is_counted_as_other(metrics: Metrics) -> None:
    for number in range(MAX_LABEL_VALUES + 50):
        metrics.refused.add((f"reason-{number}",))
        metrics.settled(f"zone-{number}", "delivered", 0.1)
    assert value(metrics, "zonerelay_inbound_refused_total", reason="other") == 50
    assert value(metrics, "zonerelay_deliveries_total", zone="other", outcome="delivered") == 50
    names = [name for name, _ in samples(metrics)]
    assert names.count("zonerelay_inbound_refused_total") == MAX_LABEL_VALUES + 1


def test_declared_zones_show_their_counters_before_any_mail(metrics: Metrics) -> None:
    metrics.declare_zones(["bulk"])
    found = samples(metrics)
    labels = frozenset({("zone", "bulk"), ("outcome", "in_doubt")})
    assert found["zonerelay_deliveries_total", labels] == 0


def test_process_metrics_are_there_and_created_series_are_not() -> None:
    names = {name for name, _ in samples(Metrics())}
    assert "process_resident_memory_bytes" in names
    assert not any(name.endswith("_created") for name in names)


def test_two_relays_in_one_process_do_not_share_counters() -> None:
    one, other = Metrics(), Metrics()
    one.dsn.add(("failed",))
    assert value(one, "zonerelay_dsn_total", kind="failed") == 1
    assert value(other, "zonerelay_dsn_total", kind="failed") == 0


def test_every_place_that_tells_of_trouble_is_there_from_the_start() -> None:
    sources = [path.read_text("utf-8") for path in Path(zonerelay.__file__).parent.rglob("*.py")]
    places = {
        place for text in sources for place in re.findall(r'(?:events\.error|Tasks)\(\s*"([a-z._]+)"', text)
    }
    assert len(places) > 20
    assert places <= set(TROUBLES)


# Readiness: which reasons, and how the probe is shared


@pytest.mark.parametrize(
    ("draining", "accepting", "unhealthy", "probe_failure", "reasons"),
    [
        (False, True, None, None, ()),
        (True, False, None, None, ("the relay is shutting down",)),
        (False, False, None, None, ("no listener accepts connections",)),
        (False, True, "the disk is full", None, ("the disk is full",)),
        (False, True, None, "input/output error", ("input/output error",)),
        (False, True, "the disk is full", "the disk is full", ("the disk is full",)),  # said once
        (True, True, "a", "b", ("the relay is shutting down", "a", "b")),
    ],
)
async def test_every_reason_is_given_once(
    draining: bool,
    accepting: bool,
    unhealthy: str | None,
    probe_failure: str | None,
    reasons: tuple[str, ...],
) -> None:
    disk = Disk()
    disk.error = StoreError(probe_failure) if probe_failure else None
    check = check_of(disk, ManualClock(), unhealthy=unhealthy, accepting=accepting, draining=draining)
    assert await check() == reasons


class Disk:
    def __init__(self) -> None:
        self.error: Exception | None = None
        self.turns = asyncio.Event()
        self.turns.set()
        self.trials = 0

    async def probe(self) -> None:
        self.trials += 1
        await self.turns.wait()
        if self.error:
            raise self.error


def check_of(
    disk: Disk,
    clock: ManualClock,
    timeout: float = 5.0,
    *,
    unhealthy: str | None = None,
    accepting: bool = True,
    draining: bool = False,
) -> ReadinessCheck:
    worker: Any = SimpleNamespace(
        store=SimpleNamespace(probe=disk.probe, unhealthy=lambda: unhealthy),
        listeners=SimpleNamespace(addresses=["127.0.0.1:2525"] if accepting else []),
        draining=draining,
        clock=clock,
    )
    return ReadinessCheck(worker, timeout=timeout)


async def test_a_result_serves_a_second_and_no_longer() -> None:
    disk, clock = Disk(), ManualClock()
    probe = check_of(disk, clock)
    assert await probe() == ()
    disk.error = StoreFullError("no space left")
    clock.advance(0.9)
    assert await probe() == ()
    clock.advance(0.2)
    assert await probe() == ("no space left",)
    assert disk.trials == 2


async def test_everybody_who_asks_meanwhile_shares_one_trial() -> None:
    disk, clock = Disk(), ManualClock()
    disk.turns.clear()
    disk.error = StoreError("input/output error")
    probe = check_of(disk, clock)
    asking = [asyncio.create_task(probe()) for _ in range(10)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asking.pop().cancel()  # one that leaves does not take the trial along
    await asyncio.sleep(0)
    disk.turns.set()
    assert set(await asyncio.gather(*asking)) == {("input/output error",)}
    assert disk.trials == 1


async def test_a_disk_that_hangs_is_a_reason_and_is_not_asked_twice() -> None:
    disk, clock = Disk(), ManualClock()
    disk.turns.clear()
    probe = check_of(disk, clock, timeout=0.0)
    for _ in range(3):
        assert await probe() == ("the spool did not complete a synced write within 0 seconds",)
        clock.advance(10)
    assert disk.trials == 1
    disk.turns.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert await probe() == ()
    await probe.close()


async def test_an_unexpected_error_is_a_reason_without_its_text() -> None:
    disk, clock = Disk(), ManualClock()
    disk.error = ValueError("a secret")
    assert await check_of(disk, clock)() == ("the spool probe failed with an unexpected ValueError",)
