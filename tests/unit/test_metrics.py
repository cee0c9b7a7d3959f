from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import zonerelay
from zonerelay.inbound.limits.memory import SessionMemory
from zonerelay.telemetry.metrics.instruments import MAX_LABEL_VALUES, ZoneQueue
from zonerelay.telemetry.metrics.metrics import TROUBLES, Metrics

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
def test_what_is_in_doubt_counts_as_such_and_an_end_as_an_end_too(
    outcome: str, is_end: bool, metrics: Metrics
) -> None:
    metrics.settled("default", outcome, 1.0, in_doubt=True)
    assert (delivered_count(metrics, "in_doubt"), delivered_count(metrics, outcome)) == (1, is_end)


def test_a_clock_that_was_set_back_does_not_make_time_negative(metrics: Metrics) -> None:
    metrics.settled("default", "delivered", -5.0)
    assert value(metrics, "zonerelay_delivery_seconds_sum") == 0


def test_the_queue_is_asked_at_scrape_time(metrics: Metrics) -> None:
    queue = [ZoneQueue("default", 1, 2, 3, 4, 5.5, 6)]
    metrics.attach_queue(lambda: queue)
    states = ("ready", "active", "deferred", "held")
    counts = [value(metrics, "zonerelay_queue_deliveries", zone="default", state=each) for each in states]
    assert counts == [1, 2, 3, 4]
    assert value(metrics, "zonerelay_outbound_connections", zone="default") == 6
    queue[0] = ZoneQueue("default", 0, 0, 0, 0, 0.0)
    assert value(metrics, "zonerelay_queue_oldest_seconds", zone="default") == 0


def test_gauges_are_read_at_scrape_time() -> None:
    metrics, memory = Metrics(), SessionMemory(1_000_000)
    metrics.read_number("zonerelay_inbound_memory_bytes", lambda: memory.total)
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
