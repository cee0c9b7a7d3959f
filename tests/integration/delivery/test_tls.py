"""STARTTLS by policy, with certificates made for the test."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, replace

import pytest
import trustme

from tests.integration.delivery.conftest import Bed
from tests.support.mail import TEXT, ZONE, Bodies, Names, make_batch, make_message, route_to
from tests.support.sink_conversation import Manners
from zonerelay.config.settings import DeliverySettings, TlsMode, ZoneSettings
from zonerelay.model.clock import ManualClock
from zonerelay.model.outcome import Scope, Verdict

D, F = Verdict.DELIVERED, Verdict.DEFERRED
NAMES = Names({"mx.example.com": ("127.0.0.1",)})


@dataclass(frozen=True, slots=True)
class Certificates:
    authority: trustme.CA
    right: ssl.SSLContext
    wrong_name: ssl.SSLContext
    untrusted: ssl.SSLContext


def server_context(authority: trustme.CA, name: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    return context


@pytest.fixture(scope="module")
def certificates() -> Certificates:
    authority, stranger = trustme.CA(), trustme.CA()
    return Certificates(
        authority,
        server_context(authority, "mx.example.com"),
        server_context(authority, "another.example.com"),
        server_context(stranger, "mx.example.com"),
    )


@pytest.fixture
def trusted(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The test's authority is the machine's only trusted one."""
    path = tmp_path_factory.mktemp("tls") / "authority.pem"
    certificates.authority.cert_pem.write_to_path(str(path))
    monkeypatch.setenv("SSL_CERT_FILE", str(path))


def zone(mode: TlsMode) -> ZoneSettings:
    return replace(ZONE, tls=mode)


@pytest.mark.parametrize("mode", [TlsMode.OPPORTUNISTIC, TlsMode.REQUIRED])
@pytest.mark.parametrize("which", ["right", "wrong_name", "untrusted"])
async def test_encrypted_whatever_the_certificate_says(
    bed: Bed, certificates: Certificates, mode: TlsMode, which: str
) -> None:
    sink = await bed.sink(Manners(tls=getattr(certificates, which)))
    courier = bed.courier(names=NAMES)
    route = route_to(sink.port, host="mx.example.com", literal=False)
    for _ in range(3):
        [outcome] = await courier.deliver(make_batch(make_message(), route, zone(mode)))
        assert (outcome.verdict, outcome.tls) == (D, "TLSv1.3")
    assert [(received.tls, received.body) for received in sink.messages] == [(True, TEXT)] * 3
    assert sink.connections == 1
    assert [command.split()[0] for command in sink.commands[:4]] == ["EHLO", "STARTTLS", "EHLO", "MAIL"]


@pytest.mark.usefixtures("trusted")
async def test_verified_certificate_is_accepted(bed: Bed, certificates: Certificates) -> None:
    sink = await bed.sink(Manners(tls=certificates.right))
    courier = bed.courier(names=NAMES)
    route = route_to(sink.port, host="mx.example.com", literal=False)
    [outcome] = await courier.deliver(make_batch(make_message(), route, zone(TlsMode.VERIFY)))
    assert (outcome.verdict, outcome.tls) == (D, "TLSv1.3 verified")


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("which", ["wrong_name", "untrusted"])
async def test_certificate_that_does_not_verify_is_refused(
    bed: Bed, certificates: Certificates, which: str
) -> None:
    sink = await bed.sink(Manners(tls=getattr(certificates, which)))
    courier = bed.courier(names=NAMES)
    route = route_to(sink.port, host="mx.example.com", literal=False)
    [outcome] = await courier.deliver(make_batch(make_message(), route, zone(TlsMode.VERIFY)))
    assert (outcome.verdict, outcome.scope, outcome.reply.status) == (F, Scope.HOST, "4.7.5")
    assert sink.messages == []
    assert courier.pool.open_connections("default") == 0


@pytest.mark.parametrize("mode", [TlsMode.REQUIRED, TlsMode.VERIFY])
async def test_required_tls_is_never_given_up(bed: Bed, certificates: Certificates, mode: TlsMode) -> None:
    without, broken = await bed.sink(), await bed.sink(Manners(broken_tls=True))
    courier = bed.courier(names=NAMES)
    route = route_to(without.port, broken.port, host="mx.example.com", literal=False)
    for _ in range(2):
        [outcome] = await courier.deliver(make_batch(make_message(), route, zone(mode)))
        assert (outcome.verdict, outcome.scope) == (F, Scope.HOST)
        assert outcome.reply.status in ("4.7.4", "4.7.5")
    assert not any(command.startswith("MAIL") for sink in (without, broken) for command in sink.commands)
    capable = await bed.sink(Manners(tls=certificates.right))
    if mode is TlsMode.REQUIRED:
        route = route_to(without.port, capable.port, host="mx.example.com", literal=False)
        assert (await courier.deliver(make_batch(make_message(), route, zone(mode))))[0].verdict is D


async def test_opportunistic_falls_back_to_clear_text_and_remembers_the_host(bed: Bed) -> None:
    sink = await bed.sink(Manners(broken_tls=True))
    clock = ManualClock()
    courier = bed.courier(names=NAMES, clock=clock, settings=DeliverySettings(quit_timeout=0.5))
    route = route_to(sink.port, host="mx.example.com", literal=False)
    once = replace(zone(TlsMode.OPPORTUNISTIC), max_messages_per_connection=1)
    connections = []
    for pause in (0.0, 10.0, 3600.0, 10.0):
        clock.advance(pause)
        [outcome] = await courier.deliver(make_batch(make_message(), route, once))
        assert (outcome.verdict, outcome.tls) == (D, "")
        connections.append(sink.connections)
    assert connections == [3, 4, 7, 8]  # a failed handshake costs two more, at first and after an hour
    assert not any(received.tls for received in sink.messages)


async def test_server_that_declines_starttls_goes_on_in_clear_text(
    bed: Bed, certificates: Certificates
) -> None:
    sink = await bed.sink(
        Manners(tls=certificates.right),
        script=lambda verb, _: "454 4.7.0 not now" if verb == "STARTTLS" else None,
    )
    courier = bed.courier(names=NAMES)
    route = route_to(sink.port, host="mx.example.com", literal=False)
    [outcome] = await courier.deliver(make_batch(make_message(), route, zone(TlsMode.OPPORTUNISTIC)))
    assert (outcome.verdict, outcome.tls) == (D, "")
    assert sink.connections == 1
    [outcome] = await courier.deliver(make_batch(make_message(), route, zone(TlsMode.REQUIRED)))
    assert outcome.verdict is F


async def test_tls_is_not_used_when_the_zone_says_none(bed: Bed, certificates: Certificates) -> None:
    sink = await bed.sink(Manners(tls=certificates.right))
    courier = bed.courier(names=NAMES)
    route = route_to(sink.port, host="mx.example.com", literal=False)
    [outcome] = await courier.deliver(make_batch(make_message(), route, zone(TlsMode.NONE)))
    assert (outcome.verdict, outcome.tls) == (D, "")


async def test_words_injected_before_the_handshake_are_discarded(
    bed: Bed, certificates: Certificates
) -> None:
    sink = await bed.sink(Manners(tls=certificates.right, injected="250-evil\r\n250 SIZE 1\r\n"))
    courier = bed.courier(names=NAMES)
    route = route_to(sink.port, host="mx.example.com", literal=False)
    [outcome] = await courier.deliver(make_batch(make_message(), route, zone(TlsMode.OPPORTUNISTIC)))
    assert outcome.verdict is D  # had the injected SIZE counted, the message would have been too large


async def test_capabilities_are_asked_again_inside_tls(bed: Bed, certificates: Certificates) -> None:
    asked = 0

    def script(verb: str, _: str) -> str | None:
        nonlocal asked
        asked += verb == "EHLO"
        return "250 sink\nSIZE 1\nSTARTTLS" if verb == "EHLO" and asked == 1 else None

    sink = await bed.sink(Manners(tls=certificates.right), script=script)
    courier = bed.courier(names=NAMES)
    route = route_to(sink.port, host="mx.example.com", literal=False)
    [outcome] = await courier.deliver(make_batch(make_message(), route, zone(TlsMode.REQUIRED)))
    assert outcome.verdict is D


@pytest.mark.parametrize("reply", ["421 4.7.0 too many connections", "554 5.7.1 bad reputation"])
async def test_a_host_that_does_not_want_us_inside_tls_is_not_asked_in_clear_text(
    bed: Bed, certificates: Certificates, reply: str
) -> None:
    asked = 0

    def script(verb: str, _: str) -> str | None:
        nonlocal asked
        asked += verb == "EHLO"
        return reply if verb == "EHLO" and asked == 2 else None

    sink = await bed.sink(Manners(tls=certificates.right), script=script)
    courier = bed.courier(names=NAMES)
    batch = make_batch(
        make_message(),
        route_to(sink.port, host="mx.example.com", literal=False),
        zone(TlsMode.OPPORTUNISTIC),
    )
    [outcome] = await courier.deliver(batch)
    assert (outcome.verdict, outcome.scope, sink.connections) == (F, Scope.HOST, 1)
    assert reply in outcome.reply.text
    [outcome] = await courier.deliver(batch)
    assert (outcome.verdict, outcome.tls) == (D, "TLSv1.3")


async def test_long_body_through_tls_is_byte_exact(bed: Bed, certificates: Certificates) -> None:
    sink = await bed.sink(Manners(tls=certificates.right))
    bodies = Bodies(b".dots and text\r\n" * 200_000)
    courier = bed.courier(bodies, names=NAMES)
    route = route_to(sink.port, host="mx.example.com", literal=False)
    batch = make_batch(make_message(bodies.body), route, zone(TlsMode.REQUIRED))
    [outcome] = await courier.deliver(batch)
    assert outcome.verdict is D
    assert sink.messages[0].body == bodies.body
