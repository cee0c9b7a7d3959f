"""`monitoring/`: every alert is fired by a real relay in its trouble, at a real Prometheus; a relay that is
well fires none; every query of the dashboard asks for what a relay shows.

Of the rules only the times are shortened: `for` is 0, because an alert's patience is what promtool tests.
"""

import asyncio
import json
import re
import shutil
import signal
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.acceptance.submission import Papers
from tests.support.certificates import DAY, make
from tests.support.crew import run
from tests.support.ports import LOOPBACK, free_ports, wait_until
from tests.support.process import PROGRAM, RelayProcess
from tests.support.prometheus import Prometheus, promtool
from tests.support.sink import Sink
from tests.support.smarthost import Smarthost
from tests.support.toml import Table

FOLDER = Path(__file__).parents[2] / "monitoring"
RULES = (FOLDER / "alerts.yml").read_text()
ALERTS = re.findall(r"- alert: (\w+)", RULES)
DASHBOARD = json.loads((FOLDER / "grafana.json").read_text())
DEAD = 10
DOCS = (Path(__file__).parents[2] / "docs" / "operate" / "monitoring.md").read_text()


def test_alerts_pass_their_unit_tests_and_lead_to_their_documentation() -> None:
    checked = promtool("test", "rules", FOLDER / "alerts_test.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    tested = (FOLDER / "alerts_test.yml").read_text()
    for alert in ALERTS:
        assert f"alertname: {alert}, exp_alerts: []" in tested
        assert f"## {alert}\n" in DOCS
        assert f'docs: "docs/operate/monitoring.md#{alert.lower()}"' in RULES


def zonerelay(*arguments: str | Path) -> None:
    subprocess.run([str(PROGRAM), *map(str, arguments)], check=True, capture_output=True, timeout=60)


def old_mail(directory: Path, relay: RelayProcess) -> None:
    """Puts a message that came five hours ago into the spool of a relay that has not been started."""
    source = RelayProcess(directory / "source", next_hop=f"{LOOPBACK}:1")
    with source:
        source.send("late@old.example")
        source.terminate()
    exported = directory / "exported"
    zonerelay("spool", "export", exported, "--config", source.config)
    for sheet in exported.glob("*.json"):
        text = re.sub(
            r'("created": )[\d.]+', lambda found: f"{found[1]}{time.time() - 5 * 3600}", sheet.read_text()
        )
        sheet.write_text(text)
    zonerelay("spool", "import", exported, "--config", relay.config)


def troubled(directory: Path, sink: Sink, smarthost: Smarthost, papers: Papers) -> RelayProcess:
    """A relay whose name server is dead, whose log-in is refused, whose certificate expires tomorrow, which
    cannot reach ten next hops, and of whose next hops one never answers.
    """
    directory.mkdir()
    now = time.time()
    certificate, key = make("relay.test", starts=now - DAY, ends=now + DAY).write(directory, "relay")
    secret = directory / "password"
    secret.write_text("wrong\n")
    secret.chmod(0o600)
    dead_name_server, closed, other = free_ports(3)
    hop = f"{LOOPBACK}:{sink.port}"
    zones: list[Table] = [
        {"name": "default", "tls": "none"},
        {"name": "stuck", "tls": "none", "next_hop": hop, "max_connections": 1},
        {"name": "bounces", "tls": "none", "next_hop": hop},
        {
            "name": "login",
            "tls": "verify",
            "next_hop": f"{LOOPBACK}:{smarthost.port}",
            "credentials": ["main"],
        },
        *({"name": f"dead{n}", "tls": "none", "next_hop": f"{LOOPBACK}:{closed}"} for n in range(DEAD)),
    ]
    routed = [str(zone["name"]) for zone in zones[1:]]
    return RelayProcess(
        directory / "relay",
        more_listeners=[
            {
                "address": f"{LOOPBACK}:{other}",
                "tls": "starttls",
                "certificate": str(certificate),
                "key": str(key),
            }
        ],
        tables={
            "zone": zones,
            "route": [{"zone": name, "recipient_domain": [f"{name}.example"]} for name in routed],
            "credential": [{"name": "main", "user": "relay", "password": str(secret)}],
            "dns": {"servers": [f"{LOOPBACK}:{dead_name_server}"], "timeout": "1s"},
        },
        environment={"SSL_CERT_FILE": str(papers.ca)},
    )


async def test_every_alert_is_fired_by_a_relay_in_trouble(tmp_path: Path, sink: Sink, papers: Papers) -> None:
    big = shutil.disk_usage(tmp_path).free > 1e12
    small = Path(tempfile.mkdtemp(dir="/dev/shm")) if big else tmp_path
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(papers.server)
    smarthost = Smarthost(tls=tls)
    await smarthost.start()
    rules = tmp_path / "alerts.yml"
    rules.write_text(re.sub(r"(?m)^( +for:) .*$", r"\1 0s", RULES))
    well = RelayProcess(tmp_path / "well", next_hop=f"{LOOPBACK}:{sink.port}", top={"workers": 2})
    ill = troubled(tmp_path / "ill", sink, smarthost, papers)
    full = RelayProcess(tmp_path / "full", spool={"path": str(small / "spool"), "min_free_space": "1 TB"})
    gone = RelayProcess(tmp_path / "gone")  # never started
    relays = {"well": well, "ill": ill, "full": full, "gone": gone}
    targets = {name: f"{LOOPBACK}:{relay.admin_port}" for name, relay in relays.items()}
    prometheus = Prometheus(tmp_path / "prometheus", targets, rules)
    with prometheus.running():
        try:
            await asyncio.to_thread(_let_it_happen, tmp_path, well, ill, full, prometheus)
            await asyncio.to_thread(_assert_all_fire, prometheus)
            await asyncio.to_thread(_assert_queries_ask_for_what_is_there, prometheus, [well, ill])
        finally:
            for relay in relays.values():
                relay.kill()
            await smarthost.close()
            if big:
                shutil.rmtree(small)


def _let_it_happen(
    directory: Path, well: RelayProcess, ill: RelayProcess, full: RelayProcess, prometheus: Prometheus
) -> None:
    old_mail(directory, ill)
    well.start()
    ill.start()
    full.start(statuses=(503,))
    well.send("someone@c.example", "someone-else@c.example")
    well.wait_for(
        lambda: well.metric("zonerelay_deliveries_total", outcome="delivered") == 2, what="delivery"
    )
    # What was counted before the first scrape is no increase.
    assert wait_until(lambda: bool(prometheus.samples('zonerelay_info{instance="ill"}')), timeout=20)
    for recipient in (
        "x@nowhere.example",
        "x@login.example",
        *(f"timeout+{n}@stuck.example" for n in range(3)),
        *(f"x@dead{n}.example" for n in range(DEAD)),
        *(f"reject-550+{n}@bounces.example" for n in range(25)),
    ):
        ill.send(recipient)
    run(ill, "suspend", "--zone", "default", "--sender", "nobody@*", "--reason", "a test")
    ill.config.write_text("workers = ?\n")
    ill.signal(signal.SIGHUP)


def _assert_all_fire(prometheus: Prometheus) -> None:
    places = {"ZonerelaySpoolUnusable": "full", "ZonerelayDiskNearlyFull": "full", "ZonerelayDown": "gone"}
    expected = {(alert, places.get(alert, "ill")) for alert in ALERTS}
    wait_until(lambda: expected <= prometheus.firing().keys(), timeout=40)
    firing = prometheus.firing()
    assert expected <= firing.keys(), expected - firing.keys()
    assert not [name for name, instance in firing if instance == "well"]
    for words in firing.values():
        assert not re.search(r"no value|error|NaN", json.dumps(words)), words


def _assert_queries_ask_for_what_is_there(prometheus: Prometheus, relays: list[RelayProcess]) -> None:
    shown = _shown(relays)
    rules = prometheus.ask("rules")["groups"][0]["rules"]
    queries = [*_queries(), *(rule["query"] for rule in rules)]
    assert len(queries) > 40
    for query in queries:
        for name, labels in _asked(query):
            assert name in shown, f"{name}: no relay shows it, but {query} asks for it"
            assert labels <= shown[name], f"{name} has no {labels - shown[name]}, but {query} asks for it"
        prometheus.samples(query)  # OSError if it is no PromQL

    # A panel that is empty here would be empty for ever, unless it is about what is not well.
    # An increase asks for two scrapes of its counter.
    def empty() -> list[str]:
        return [query for query in _queries() if not prometheus.samples(query.removesuffix(" > 0"))]

    wait_until(lambda: not empty(), timeout=20)
    assert empty() == []


def _shown(relays: list[RelayProcess]) -> dict[str, set[str]]:
    """The labels of every metric of these relays; Prometheus adds two, and `up`."""
    shown: dict[str, set[str]] = {"up": {"job", "instance"}}
    for relay in relays:
        for family in text_string_to_metric_families(relay.http("/metrics")[1]):
            for sample in family.samples:
                shown.setdefault(sample.name, {"job", "instance"}).update(sample.labels)
    return shown


def _queries() -> Iterator[str]:
    """What the panels ask, as Grafana would ask it with all of everything chosen."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for variable, value in (
                ("job", ".*"),
                ("instance", ".*"),
                ("zone", ".*"),
                ("__rate_interval", "1m"),
            ):
                query = query.replace(f"${variable}", value)
            assert "$" not in query
            yield query


def _asked(query: str) -> Iterator[tuple[str, set[str]]]:
    """The metrics of a query, each with the labels of its own selector and those of a `by` around it."""
    grouped = set(re.findall(r"\w+", " ".join(re.findall(r"\bby \(([^)]*)\)", query)))) - {"le"}
    for found in re.finditer(r"\b(zonerelay_\w+|process_\w+|up)\b(?:\{([^}]*)\})?", query):
        yield found[1], grouped | set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", found[2] or ""))
