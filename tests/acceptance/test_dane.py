"""DANE from end to end: a validating resolver with signed zones, a relay, and servers that are attacked.

The resolver is unbound, as an operator has it; nothing in here sets an AD bit by itself.
"""

import asyncio
import hashlib
import ssl
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.certificates import DAY, Made, make
from tests.support.ports import LOOPBACK, free_port
from tests.support.relay import Running, relay_with, settings
from tests.support.sink import Sink
from tests.support.sink_conversation import Manners
from tests.support.validating import Records, ValidatingResolver
from zonerelay.config.settings import DnsSettings, TlsMode, ZoneSettings
from zonerelay.control.client import ControlClient
from zonerelay.control.socket import control_socket_path
from zonerelay.operations.answers import Explanation
from zonerelay.operations.requests import Explain
from zonerelay.telemetry.events.events import Field

PORT = free_port()
NOW = time.time()
MESSAGE = b"From: app@example.org\r\nSubject: hello\r\n\r\nOne line.\r\n"


def certificate(*names: str, issuer: Made | None = None, common_name: str = "", ends: float = DAY) -> Made:
    return make(
        *names,
        issuer=issuer,
        common_name=common_name,
        authority=bool(common_name),
        starts=NOW - 2 * DAY,
        ends=NOW + ends,
    )


ROOT = certificate(common_name="Example Root")
OURS = certificate("anything.example", ends=-DAY)  # DANE-EE looks neither at names nor at dates
ISSUED = certificate("by-authority.signed.example", issuer=ROOT)


def ee(made: Made) -> str:
    return f"3 1 1 {hashlib.sha256(made.public_key_der).hexdigest()}"


def hosts(**tlsa: Sequence[str]) -> dict[str, dict[str, Sequence[str]]]:
    """For each name a domain with one MX host, `mx.` below it, and that host's TLSA records."""
    records: dict[str, dict[str, Sequence[str]]] = {}
    for name, texts in tlsa.items():
        label = name.replace("_", "-")
        records[label] = {"MX": [f"10 mx.{label}"]}
        records[f"mx.{label}"] = {"A": [LOOPBACK]}
        if texts:
            records[f"_{PORT}._tcp.mx.{label}"] = {"TLSA": texts}
    return records


SIGNED: Records = {
    **hosts(
        good=[ee(OURS)],
        rollover=[ee(ISSUED), ee(OURS)],
        wrong=[ee(ISSUED)],
        bogus=[ee(OURS)],
        none=[],
        useless=["0 0 1 " + "ab" * 32, "3 1 1 abcd"],
        by_authority=[f"2 0 1 {hashlib.sha256(ROOT.der).hexdigest()}"],
    ),
    "two": {"MX": ["10 mx.wrong", "20 mx.good"]},
    "mx.alias": {"CNAME": ["mx.good"]},
    "alias": {"MX": ["10 mx.alias"]},
    "away": {"MX": ["10 mx.wrong.plain.example."]},
}
PLAIN: Records = {**hosts(wrong=[ee(ISSUED)]), "into": {"MX": ["10 mx.wrong.signed.example."]}}


@pytest.fixture(scope="module")
def resolver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValidatingResolver]:
    resolver = ValidatingResolver(
        tmp_path_factory.mktemp("unbound"),
        {"signed.example": SIGNED, "plain.example": PLAIN},
        signed=["signed.example"],
        bogus=[(f"_{PORT}._tcp.mx.bogus.signed.example", "TLSA")],
    )
    with resolver.running():
        yield resolver


@dataclass
class Bed:
    running: Running
    sink: Sink

    async def mail_to(self, domain: str) -> None:
        await self.running.send("app@example.org", [f"someone@{domain}"], MESSAGE)

    async def delivered(self, domain: str) -> dict[str, Field]:
        await self.mail_to(domain)
        [event] = await self.running.until_logged("delivered")
        assert len(self.sink.messages) == 1
        return event

    async def deferred(self, domain: str) -> str:
        """The reason; nothing of the mail was told to anybody."""
        await self.mail_to(domain)
        event = (await self.running.until_logged("deferred"))[0]
        assert not self.sink.messages
        assert not any(command.startswith("MAIL") for command in self.sink.commands)
        return str(event["reply"])

    def counted(self) -> list[str]:
        text = self.running.worker.metrics.exposition().decode()
        name = "zonerelay_outbound_tls_sessions_total"
        lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
        return [line.removeprefix(name) for line in lines if not line.endswith(" 0.0")]


@asynccontextmanager
async def bed(
    directory: Path,
    resolver: ValidatingResolver,
    manners: Manners,
    *,
    tls: TlsMode = TlsMode.OPPORTUNISTIC,
    next_hop: str = "",
) -> AsyncIterator[Bed]:
    zone = ZoneSettings(port=PORT, allow_private_addresses=True, tls=tls, next_hop=next_hop)
    chosen = replace(
        settings(directory, zone=zone),
        dns=DnsSettings(servers=(resolver.address,), trust_ad=True, timeout=5.0),
    )
    async with Sink(port=PORT, manners=manners) as sink, relay_with(chosen) as running:
        yield Bed(running, sink)


def showing(made: Made, *above: Made) -> Manners:
    return Manners(tls=made.server_context(*above))


STRIPPED = Manners()
BROKEN = Manners(broken_tls=True)
BOGUS = "has TLSA records, but the lookup failed"


# ---- who passes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("domain", ["good", "rollover", "alias"])
@pytest.mark.parametrize("tls", [TlsMode.OPPORTUNISTIC, TlsMode.REQUIRED, TlsMode.DANE])
async def test_a_certificate_that_the_records_vouch_for(
    tmp_path: Path, resolver: ValidatingResolver, tls: TlsMode, domain: str
) -> None:
    async with bed(tmp_path, resolver, showing(OURS), tls=tls) as it:
        event = await it.delivered(f"{domain}.signed.example")
        assert event["tls"] == "TLSv1.3 dane"
        assert it.sink.messages[0].tls
        assert it.counted() == ['{level="dane",result="ok",zone="default"} 1.0']


async def test_an_authority_that_the_records_vouch_for(tmp_path: Path, resolver: ValidatingResolver) -> None:
    named = certificate("mx.by-authority.signed.example", issuer=ROOT)
    async with bed(tmp_path, resolver, showing(named, ROOT)) as it:
        assert (await it.delivered("by-authority.signed.example"))["tls"] == "TLSv1.3 dane"


async def test_the_server_is_asked_for_by_the_name_that_the_records_are_at(
    tmp_path: Path, resolver: ValidatingResolver
) -> None:
    asked: list[str] = []
    context = OURS.server_context()

    def note(_: ssl.SSLObject, name: str, __: ssl.SSLContext) -> None:
        asked.append(name)

    context.sni_callback = note
    async with bed(tmp_path, resolver, Manners(tls=context)) as it:
        await it.delivered("alias.signed.example")
    assert asked == ["mx.good.signed.example"]


async def test_a_named_next_hop_is_held_to_its_records(tmp_path: Path, resolver: ValidatingResolver) -> None:
    hop = f"[mx.good.signed.example]:{PORT}"
    async with bed(tmp_path, resolver, showing(OURS), next_hop=hop, tls=TlsMode.DANE) as it:
        assert (await it.delivered("anywhere.example"))["tls"] == "TLSv1.3 dane"
    hop = f"[mx.wrong.signed.example]:{PORT}"
    async with bed(tmp_path, resolver, showing(OURS), next_hop=hop) as it:
        assert "none of the TLSA records" in await it.deferred("anywhere.example")


async def test_another_host_of_the_domain_may_do(tmp_path: Path, resolver: ValidatingResolver) -> None:
    async with bed(tmp_path, resolver, showing(OURS)) as it:
        event = await it.delivered("two.signed.example")
        assert (event["host"], event["tls"]) == ("mx.good.signed.example", "TLSv1.3 dane")
        assert sorted(it.counted()) == [
            '{level="dane",result="failed",zone="default"} 1.0',
            '{level="dane",result="ok",zone="default"} 1.0',
        ]


# ---- who fails -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tls", [TlsMode.OPPORTUNISTIC, TlsMode.REQUIRED, TlsMode.DANE])
async def test_other_certificates_get_no(tmp_path: Path, resolver: ValidatingResolver, tls: TlsMode) -> None:
    async with bed(tmp_path, resolver, showing(OURS), tls=tls) as it:
        reply = await it.deferred("wrong.signed.example")
        assert reply.startswith("451 4.7.5 mx.wrong.signed.example (127.0.0.1:")
        assert ee(OURS) in reply  # what the operator there has to publish
        assert it.counted()[0].startswith('{level="dane",result="failed"')


# ---- downgrade attempts --------------------------------------------------------------------------


@pytest.mark.parametrize(("manners", "status"), [(STRIPPED, "4.7.4"), (BROKEN, "4.7.5")])
@pytest.mark.parametrize("domain", ["good", "useless"])
async def test_records_and_no_tls_is_no_mail(
    tmp_path: Path, resolver: ValidatingResolver, domain: str, manners: Manners, status: str
) -> None:
    async with bed(tmp_path, resolver, manners) as it:
        reply = await it.deferred(f"{domain}.signed.example")
        assert reply.startswith(f"451 {status} ")
        assert f"the TLSA records of mx.{domain}.signed.example " in reply


async def test_a_bogus_record_means_no_connection(tmp_path: Path, resolver: ValidatingResolver) -> None:
    for manners in (showing(OURS), STRIPPED):
        async with bed(tmp_path / str(id(manners)), resolver, manners) as it:
            reply = await it.deferred("bogus.signed.example")
            assert reply.startswith("451 4.7.5 mx.bogus.signed.example has TLSA records, but the lookup")
            assert it.sink.connections == 0


# ---- where DANE has no say -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "domain", ["none.signed.example", "wrong.plain.example", "into.plain.example", "away.signed.example"]
)
async def test_without_security_all_the_way_mail_goes_as_ever(
    tmp_path: Path, resolver: ValidatingResolver, domain: str
) -> None:
    async with bed(tmp_path / "tls", resolver, showing(OURS)) as it:
        assert (await it.delivered(domain))["tls"] == "TLSv1.3"
    async with bed(tmp_path / "clear", resolver, STRIPPED) as it:
        assert (await it.delivered(domain))["tls"] == ""
        assert it.counted() == ['{level="opportunistic",result="fallback",zone="default"} 1.0']


# ---- what operators are told ---------------------------------------------------------------------


async def test_explain_says_what_dane_makes_of_hosts(tmp_path: Path, resolver: ValidatingResolver) -> None:
    async with bed(tmp_path, resolver, showing(OURS)) as it:
        client = ControlClient(control_socket_path(it.running.worker.settings))
        told = {}
        for domain in ("good.signed.example", "bogus.signed.example", "none.signed.example"):
            found = await asyncio.to_thread(client.ask, Explain(address=domain), Explanation)
            told[domain] = [(host.tlsa, host.problem) for host in found.hosts]
        assert told == {
            "good.signed.example": [(("3 1 1",), "")],
            "bogus.signed.example": [
                ((), f"mx.bogus.signed.example {BOGUS}: the name server returned a failure")
            ],
            "none.signed.example": [((), "")],
        }
        assert it.sink.connections == 0
