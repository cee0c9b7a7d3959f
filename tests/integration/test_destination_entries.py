"""[[destination]] from a client to the hosts: other TLS and limits for some, at once after a reload."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from tests.support.certificates import make
from tests.support.dns import FakeDns
from tests.support.relay import LOOPBACK, Running, relay_with, settings
from tests.support.sink import Sink
from tests.support.sink_conversation import Manners
from zonerelay.config.settings import (
    DestinationSettings,
    RetrySettings,
    Settings,
    TlsMode,
    ZoneSettings,
)

HOST = "mx.provider.example"
MESSAGE = b"From: app@example.org\r\nSubject: hello\r\n\r\nOne line.\r\n"
PATIENT = RetrySettings(schedule=(600.0,), jitter=0.0)


def entry(**options: object) -> DestinationSettings:
    return DestinationSettings(**options)  # type: ignore[arg-type]  # options by name


class Provider:
    """One host that takes the mail of strict.example and plain.example."""

    def __init__(self, directory: Path, dns: FakeDns, sink: Sink) -> None:
        self.directory = directory
        self.dns = dns
        self.sink = sink

    def settings(self, destination: Sequence[DestinationSettings], **zone: object) -> Settings:
        options = {"port": self.sink.port, "allow_private_addresses": True, **zone}
        chosen = ZoneSettings(**options)  # type: ignore[arg-type]  # options by name
        return settings(
            self.directory, zone=chosen, dns=self.dns.address, destination=destination, retry=PATIENT
        )

    @asynccontextmanager
    async def relay(self, *destination: DestinationSettings, **zone: object) -> AsyncIterator[Running]:
        async with relay_with(self.settings(destination, **zone)) as running:
            yield running


@pytest.fixture
async def provider(tmp_path: Path, sink: Sink) -> AsyncIterator[Provider]:
    mx = {"MX": [f"10 {HOST}"]}
    async with FakeDns({"strict.example": mx, "plain.example": mx, HOST: {"A": [LOOPBACK]}}) as dns:
        yield Provider(tmp_path, dns, sink)


def context(authority: trustme.CA, *names: str) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names).configure_cert(made)
    return made


def trust(authority: trustme.CA, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = directory / "authority.pem"
    authority.cert_pem.write_to_path(str(path))
    monkeypatch.setenv("SSL_CERT_FILE", str(path))


async def only_strict(running: Running) -> None:
    """Of the two domains strict.example gets mail, and plain.example none."""
    await running.send("app@example.org", ["ann@strict.example", "bob@plain.example"], MESSAGE)
    [delivered] = await running.until_logged("delivered")
    assert "strict.example" in str(delivered["recipient"])
    [deferred] = await running.until_logged("deferred")
    assert "plain.example" in str(deferred["recipient"])


async def test_one_domain_is_verified_and_its_neighbour_at_the_same_host_is_not(provider: Provider) -> None:
    provider.sink.manners = Manners(tls=context(trustme.CA(), HOST))
    strict = entry(domain=("strict.example",), tls=TlsMode.VERIFY)
    async with provider.relay(strict) as running:
        await running.send("app@example.org", ["ann@strict.example", "bob@plain.example"], MESSAGE)
        [delivered] = await running.until_logged("delivered")
        [deferred] = await running.until_logged("deferred")
        assert "plain.example" in str(delivered["recipient"])
        assert str(delivered["tls"]).startswith("TLSv1.3")
        assert "strict.example" in str(deferred["recipient"])
        assert "451 4.7." in str(deferred["reply"])


async def test_one_host_is_sent_clear_text_where_the_zone_wants_tls(provider: Provider) -> None:
    provider.sink.manners = Manners(tls=context(trustme.CA(), HOST))
    async with provider.relay(
        entry(mx=("*.provider.example",), tls=TlsMode.NONE), tls=TlsMode.REQUIRED
    ) as running:
        await running.send("app@example.org", ["ann@strict.example"], MESSAGE)
        [received] = await provider.sink.wait_for(1)
        assert not received.tls


async def test_a_certificate_for_one_of_the_names_given_is_enough(
    provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    trust(authority, tmp_path, monkeypatch)
    provider.sink.manners = Manners(tls=context(authority, "a.hosting.example"))
    named = entry(
        domain=("strict.example",), tls=TlsMode.VERIFY, tls_names=("*.hosting.example", "x.example")
    )
    other = entry(domain=("plain.example",), tls=TlsMode.VERIFY, tls_names=("x.example",))
    async with provider.relay(named, other) as running:
        await only_strict(running)


async def test_a_fingerprint_is_enough_whoever_signed_the_certificate(provider: Provider) -> None:
    made = make("somewhere.else", starts=0.0, ends=4_000_000_000.0)
    provider.sink.manners = Manners(tls=made.server_context())
    pinned = entry(domain=("strict.example",), tls=TlsMode.VERIFY, tls_certificates=(made.fingerprint,))
    wrong = entry(domain=("plain.example",), tls=TlsMode.VERIFY, tls_certificates=("00" * 32,))
    async with provider.relay(pinned, wrong) as running:
        await only_strict(running)


async def test_a_next_hop_is_met_by_its_host_and_never_by_a_domain(provider: Provider) -> None:
    by_domain = entry(domain=("*",), tls=TlsMode.REQUIRED)
    by_host = entry(mx=("[127.0.0.1]",), max_recipients_per_transaction=1)
    async with provider.relay(by_domain, by_host, next_hop=f"{LOOPBACK}:{provider.sink.port}") as running:
        recipients = [f"user{at}@strict.example" for at in range(3)]
        await running.send("app@example.org", recipients, MESSAGE)
        received = await provider.sink.wait_for(3)
        assert sorted(message.recipients for message in received) == [(each,) for each in recipients]
        explained = await running.explain("user0@strict.example")
        assert (explained.destination, explained.tls) == ("destination[1]", "opportunistic")
        assert explained.limits["max_recipients_per_transaction"] == 1
        assert explained.limits["max_messages_per_connection"] == 1000


async def test_other_tables_count_at_once_after_a_reload(provider: Provider) -> None:
    async with provider.relay() as running:
        await running.send("app@example.org", ["ann@strict.example"], MESSAGE)
        await running.until_logged("delivered")
        demanding = entry(domain=("strict.example",), tls=TlsMode.REQUIRED)
        await running.worker.reload(replace(running.worker.settings, destination=(demanding,)))
        await running.send("app@example.org", ["ann@strict.example"], MESSAGE)
        [deferred] = await running.until_logged("deferred")
        assert "does not offer STARTTLS" in str(deferred["reply"])
        explained = await running.explain("ann@strict.example")
        assert (explained.destination, explained.tls) == ("destination[0]", "required")
        assert explained.tls_demand is not None
        assert explained.tls_demand.because == "destination"
        assert len(running.log.named("delivered")) == 1


async def test_tables_that_cannot_be_read_change_nothing(provider: Provider) -> None:
    async with provider.relay() as running:
        wrong = entry(domain=("ü..example",), tls=TlsMode.REQUIRED)
        await running.worker.reload(replace(running.worker.settings, destination=(wrong,)))
        assert "the previous configuration stays active" in running.worker.problems[0]
        await running.send("app@example.org", ["ann@strict.example"], MESSAGE)
        await running.until_logged("delivered")
