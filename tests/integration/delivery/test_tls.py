"""Each level of TLS: who passes, who fails and in which words, and who tries to talk us out of it."""

import asyncio
import contextlib
import hashlib
import itertools
import os
import ssl
import time
from dataclasses import replace
from pathlib import Path

import pytest
import trustme
from msgspec import structs

from tests.integration.delivery.conftest import Bed
from tests.support import mail
from tests.support.certificates import DAY, Made, make
from tests.support.mail import ZONE, TlsResults, make_batch, make_message, route_to
from tests.support.sink import Sink
from tests.support.sink_conversation import Manners, Script
from zonerelay.config.settings import DeliverySettings, SourceSettings, TlsMode, ZoneSettings
from zonerelay.delivery.batch.courier import SmtpCourier
from zonerelay.delivery.tls import plan
from zonerelay.model.clock import ManualClock
from zonerelay.model.reply import Outcome, Scope, Verdict
from zonerelay.routing.destinations.route import Route, TlsDemand
from zonerelay.routing.dns.answers import DnsAnswer, DnsStatus, TlsaRecord

HOST = "mx.example.com"
NOW = time.time()


def certificate(*names: str, issuer: Made | None = None, starts: float = -DAY, ends: float = DAY) -> Made:
    common_name = "" if names else "Test authority"
    return make(
        *names,
        issuer=issuer,
        common_name=common_name,
        authority=not names,
        starts=NOW + starts,
        ends=NOW + ends,
    )


AUTHORITY = certificate()
RIGHT = certificate(HOST, "*.example.org", issuer=AUTHORITY)
WRONG_NAME = certificate("elsewhere.example", "another.example", issuer=AUTHORITY)
EXPIRED = certificate(HOST, issuer=AUTHORITY, starts=-2 * DAY, ends=-DAY)
NOT_YET = certificate(HOST, issuer=AUTHORITY, starts=DAY, ends=2 * DAY)
SELF_SIGNED = certificate(HOST)
STRANGER = make(common_name="Another authority", authority=True, starts=NOW - DAY, ends=NOW + DAY)
UNKNOWN_ISSUER = certificate(HOST, issuer=STRANGER)


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The test's authority is the machine's only trusted one."""
    path = tmp_path_factory.mktemp("tls") / "authority.pem"
    path.write_bytes(AUTHORITY.pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(path))


def names(**records: DnsAnswer[TlsaRecord]) -> mail.Names:
    return mail.Names({HOST: ("127.0.0.1",)}, secure=[HOST], records=records)


def to(sink: Sink, demand: TlsDemand | None, *, domain: str = "example.com") -> Route:
    route = route_to(sink.port, host=HOST, literal=False)
    return structs.replace(route, tls=demand, name=domain)


async def deliver(
    courier: SmtpCourier,
    sink: Sink,
    demand: TlsDemand | None,
    zone: ZoneSettings = ZONE,
    *,
    domain: str = "example.com",
) -> Outcome:
    """Without a demand of its route the zone says what is wanted."""
    message = make_message(recipients=[f"anybody@{domain}"])
    [outcome] = await courier.deliver(make_batch(message, to(sink, demand, domain=domain), zone))
    return outcome


async def refusal(
    courier: SmtpCourier, sink: Sink, demand: TlsDemand | None, zone: ZoneSettings = ZONE
) -> str:
    """Why the host was not used; nothing of the mail was told to anybody."""
    outcome = await deliver(courier, sink, demand, zone)
    assert (outcome.verdict, outcome.scope) == (Verdict.DEFERRED, Scope.HOST)
    assert not sink.messages
    assert not any(command.startswith("MAIL") for command in sink.commands)
    assert courier.pool.open_connections("default") == 0
    return str(outcome.reply)


def showing(made: Made, *above: Made) -> Manners:
    return Manners(tls=made.server_context(*above))


VERIFY = TlsDemand(TlsMode.VERIFY)
POLICY = TlsDemand(TlsMode.VERIFY, because="mta-sts")
PINNED = TlsDemand(TlsMode.VERIFY, certificates=(SELF_SIGNED.fingerprint,), because="destination")


# ---- who passes ----------------------------------------------------------------------------------


async def test_pinned_certificates_are_shown_each_time(bed: Bed) -> None:
    """A session from a connection that pins none is not resumed."""
    manners = showing(SELF_SIGNED)
    sink, courier = await bed.sink(manners), bed.courier(names=names())
    for demand in (TlsDemand(TlsMode.REQUIRED), PINNED, TlsDemand()):
        assert (await deliver(courier, sink, demand)).verdict is Verdict.DELIVERED
    assert manners.tls is not None
    assert (sink.connections, manners.tls.session_stats()["hits"]) == (3, 0)


@pytest.mark.parametrize(
    ("demand", "shown", "words", "level"),
    [
        (TlsDemand(), SELF_SIGNED, "TLSv1.3", "opportunistic"),
        (TlsDemand(TlsMode.REQUIRED), EXPIRED, "TLSv1.3", "required"),
        (VERIFY, RIGHT, "TLSv1.3 verified", "verify"),
        (POLICY, RIGHT, "TLSv1.3 mta-sts", "mta-sts"),
        (PINNED, SELF_SIGNED, "TLSv1.3 verified", "verify"),
        (TlsDemand(TlsMode.VERIFY, names=("*.elsewhere", "another.example")), WRONG_NAME, "", "verify"),
        (TlsDemand(TlsMode.VERIFY, names=("host.example.org",)), RIGHT, "TLSv1.3 verified", "verify"),
    ],
)
async def test_what_a_connection_is_worth_is_kept_and_counted(
    bed: Bed, demand: TlsDemand, shown: Made, words: str, level: str
) -> None:
    sink = await bed.sink(showing(shown))
    results = TlsResults()
    courier = bed.courier(names=names(), observe_tls=results)
    for _ in range(2):  # the second on the idle connection of the first
        outcome = await deliver(courier, sink, demand)
        assert (outcome.verdict, outcome.tls) == (Verdict.DELIVERED, words or "TLSv1.3 verified")
    assert (sink.connections, results.seen, results.news) == (1, [(level, "ok")], [])


async def test_clear_text_is_counted_where_tls_was_wanted(bed: Bed) -> None:
    results = TlsResults()
    courier = bed.courier(names=names(), observe_tls=results)
    assert (await deliver(courier, await bed.sink(), TlsDemand(TlsMode.NONE))).tls == ""
    assert results.seen == []
    assert (await deliver(courier, await bed.sink(), TlsDemand())).tls == ""
    assert (results.seen, results.news) == ([("opportunistic", "fallback")], [])
    broken = await bed.sink(Manners(broken_tls=True))
    once = replace(ZONE, max_messages_per_connection=1)
    for _ in range(2):
        assert (await deliver(courier, broken, TlsDemand(), once)).tls == ""
    assert results.seen[1:] == [("opportunistic", "fallback")] * 2
    [news] = results.news  # of the second connection nothing new is known
    assert news.startswith(f"{HOST}: TLS with {HOST} (127.0.0.1:{broken.port}) failed: ")


# ---- who fails, in which words -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        (EXPIRED, "its certificate has expired"),
        (NOT_YET, "its certificate is not valid yet"),
        (SELF_SIGNED, "its certificate is self-signed"),
        (UNKNOWN_ISSUER, "not issued by an authority that this machine trusts"),
        (WRONG_NAME, f"its certificate is for elsewhere.example, another.example, not for {HOST}"),
    ],
)
@pytest.mark.parametrize("demand", [VERIFY, POLICY])
async def test_a_wrong_certificate_is_named(bed: Bed, demand: TlsDemand, shown: Made, words: str) -> None:
    sink = await bed.sink(showing(shown))
    results = TlsResults()
    courier = bed.courier(names=names(), observe_tls=results)
    reply = await refusal(courier, sink, demand)
    assert reply.startswith("451 4.7.5 ")
    assert f"{HOST} (127.0.0.1:{sink.port})" in reply
    assert words in reply
    who = "the MTA-STS policy of example.com" if demand is POLICY else "zone default"
    assert reply.endswith(f"; {who} requires a valid certificate")
    assert [result for _, result in results.seen] == ["failed"]


async def test_a_pinned_certificate_is_no_other(bed: Bed) -> None:
    sink = await bed.sink(showing(RIGHT))
    reply = await refusal(bed.courier(names=names()), sink, PINNED)
    assert f"not one of the expected ones; its fingerprint is {RIGHT.fingerprint}" in reply


async def test_another_host_of_the_route_may_do(bed: Bed) -> None:
    bad, good = await bed.sink(showing(EXPIRED)), await bed.sink(showing(RIGHT))
    route = structs.replace(route_to(bad.port, good.port, host=HOST, literal=False), tls=VERIFY)
    courier = bed.courier(names=names())
    [outcome] = await courier.deliver(make_batch(make_message(), route))
    assert (outcome.verdict, outcome.tls) == (Verdict.DELIVERED, "TLSv1.3 verified")


async def test_authorities_are_read_again_when_their_file_has_changed(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As an upgrade of ca-certificates replaces it: an authority comes, and goes, without a reload."""
    sink = await bed.sink(showing(RIGHT))
    courier = bed.courier(names=names())
    trusted = Path(os.environ["SSL_CERT_FILE"]).read_bytes()
    bundle, another = tmp_path / "bundle.pem", trustme.CA().cert_pem.bytes()
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    for authorities, is_trusted in ((another, False), (another + trusted, True), (another, False)):
        draft = tmp_path / "draft"
        draft.write_bytes(authorities)
        draft.replace(bundle)
        if is_trusted:
            assert (await deliver(courier, sink, VERIFY)).verdict is Verdict.DELIVERED
            courier.pool.close_idle()
            sink.messages.clear()
            sink.commands.clear()
        else:
            await refusal(courier, sink, VERIFY)


# ---- downgrade attempts --------------------------------------------------------------------------


def refuse(code: str) -> Script:
    return lambda verb, _: f"{code} not now" if verb == "STARTTLS" else None


DEMANDS = [TlsDemand(TlsMode.REQUIRED), VERIFY, POLICY, PINNED, TlsDemand(TlsMode.DANE, dane=True)]


@pytest.mark.parametrize(
    ("manners", "script", "status"),
    [
        (Manners(), None, "4.7.4"),
        (Manners(esmtp=False), None, "4.7.4"),
        (showing(RIGHT), refuse("454 4.7.0"), "4.7.4"),
        (showing(RIGHT), refuse("500 5.5.1"), "4.7.4"),
        (showing(RIGHT), refuse("250 2.0.0"), "4.7.4"),
        (Manners(broken_tls=True), None, "4.7.5"),
    ],
    ids=["STARTTLS stripped", "EHLO refused", "454", "500", "250", "handshake broken"],
)
@pytest.mark.parametrize("demand", DEMANDS)
async def test_nobody_talks_us_into_clear_text(
    bed: Bed, demand: TlsDemand, manners: Manners, script: Script | None, status: str
) -> None:
    sink = await bed.sink(manners, script=script)
    courier = bed.courier(names=names(**{f"_{sink.port}._tcp.{HOST}": vouching(RIGHT)}))
    assert (await refusal(courier, sink, demand)).startswith(f"451 {status} ")


@pytest.mark.parametrize("demand", [TlsDemand(), *DEMANDS])
async def test_words_slipped_in_before_the_handshake_are_nothing(bed: Bed, demand: TlsDemand) -> None:
    shown = SELF_SIGNED if demand is PINNED else RIGHT
    sink = await bed.sink(replace(showing(shown), injected="250-evil\r\n250 SIZE 1\r\n"))
    courier = bed.courier(names=names(**{f"_{sink.port}._tcp.{HOST}": vouching(shown)}))
    assert (await deliver(courier, sink, demand)).verdict is Verdict.DELIVERED
    assert sink.messages[0].tls


async def test_a_server_that_only_speaks_old_versions_is_not_trusted_with_anything(bed: Bed) -> None:
    context = RIGHT.server_context()
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="deprecated"):
        context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    sink = await bed.sink(Manners(tls=context))
    reply = await refusal(bed.courier(names=names()), sink, VERIFY)
    assert reply.startswith("451 4.7.5 ")


async def test_a_server_that_leaves_in_the_handshake_is_no_reason_for_clear_text(bed: Bed) -> None:
    said: list[bytes] = []

    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mx ESMTP\r\n")
        said.append(await reader.readline())
        writer.write(b"250-mx\r\n250 STARTTLS\r\n")
        said.append(await reader.readline())
        writer.write(b"220 go ahead\r\n")
        await reader.read(1)

    port = await bed.peer(leave)
    route = structs.replace(route_to(port, host=HOST, literal=False), tls=TlsDemand(TlsMode.REQUIRED))
    [outcome] = await bed.courier(names=names()).deliver(make_batch(make_message(), route))
    assert outcome.reply.status == "4.7.5"
    # Twice: it may not have taken the first message of the handshake for its size.
    assert [line.split()[0] for line in said] == [b"EHLO", b"STARTTLS"] * 2


# ---- DANE, on both loops -------------------------------------------------------------------------


def vouching(made: Made, *, usage: int = 3, secure: bool = True) -> DnsAnswer[TlsaRecord]:
    record = TlsaRecord(usage, 1, 1, hashlib.sha256(made.public_key_der).digest())
    return DnsAnswer(DnsStatus.OK, (record,), 1e12, secure)


@pytest.mark.parametrize("usage", [2, 3])
async def test_the_chain_of_a_server_is_seen_whoever_signed_it(bed: Bed, usage: int) -> None:
    root = certificate()
    server = certificate(HOST, issuer=root)
    sink = await bed.sink(showing(server, root))
    answer = vouching(root if usage == 2 else server, usage=usage)
    courier = bed.courier(names=names(**{f"_{sink.port}._tcp.{HOST}": answer}), clock=_Today())
    outcome = await deliver(courier, sink, TlsDemand(dane=True))
    assert (outcome.verdict, outcome.tls) == (Verdict.DELIVERED, "TLSv1.3 dane")


async def test_an_operators_verify_holds_beside_the_records(bed: Bed) -> None:
    sink = await bed.sink(showing(SELF_SIGNED))
    courier = bed.courier(names=names(**{f"_{sink.port}._tcp.{HOST}": vouching(SELF_SIGNED)}))
    demand = TlsDemand(TlsMode.VERIFY, dane=True)
    assert "self-signed" in await refusal(courier, sink, demand)
    assert (await deliver(courier, sink, structs.replace(demand, because="mta-sts"))).tls == "TLSv1.3 dane"


async def test_a_certificate_for_the_domain_alone_carries_no_other_domains_mail(bed: Bed) -> None:
    root = certificate()
    server = certificate("example.com", "example.net", issuer=root)
    sink = await bed.sink(showing(server, root))
    records = {f"_{sink.port}._tcp.{HOST}": vouching(root, usage=2)}
    courier = bed.courier(names=names(**records), clock=_Today())
    demand = TlsDemand(dane=True)
    for domain, connections in (("example.com", 1), ("example.com", 1), ("example.net", 2)):
        outcome = await deliver(courier, sink, demand, domain=domain)
        assert (outcome.verdict, sink.connections) == (Verdict.DELIVERED, connections)
    outcome = await deliver(courier, sink, demand, domain="example.org")
    assert "not for mx.example.com or example.org" in outcome.reply.text


async def test_what_counts_is_whose_mail_it_is_and_not_whose_route(bed: Bed) -> None:
    """Domains with the same hosts share a line, which has the route of whoever was looked up last."""
    root = certificate()
    sink = await bed.sink(showing(certificate("attacker.example", issuer=root), root))
    records = {f"_{sink.port}._tcp.{HOST}": vouching(root, usage=2)}
    courier = bed.courier(names=names(**records), clock=_Today())
    route = to(sink, TlsDemand(dane=True), domain="attacker.example")
    for recipients in (["a@example.com"], ["x@attacker.example", "a@example.com"]):
        batch = make_batch(make_message(recipients=recipients), route)
        outcomes = await courier.deliver(batch)
        assert {outcome.verdict for outcome in outcomes} == {Verdict.DEFERRED}
        assert "not for mx.example.com" in outcomes[0].reply.text
    batch = make_batch(
        make_message(recipients=["x@Attacker.example"]), structs.replace(route, name="example.com")
    )
    assert [outcome.verdict for outcome in await courier.deliver(batch)] == [Verdict.DELIVERED]
    batch = make_batch(make_message(recipients=["a@example.com"]), route)
    assert [outcome.verdict for outcome in await courier.deliver(batch)] == [Verdict.DEFERRED]


# ---- what the zone says ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "shown", "tls"),
    [
        (TlsMode.NONE, RIGHT, ""),
        (TlsMode.OPPORTUNISTIC, SELF_SIGNED, "TLSv1.3"),
        (TlsMode.REQUIRED, WRONG_NAME, "TLSv1.3"),
        (TlsMode.VERIFY, RIGHT, "TLSv1.3 verified"),
    ],
)
async def test_a_zone_is_content_with(bed: Bed, mode: TlsMode, shown: Made, tls: str) -> None:
    sink = await bed.sink(showing(shown))
    outcome = await deliver(bed.courier(names=names()), sink, None, replace(ZONE, tls=mode))
    assert (outcome.verdict, outcome.tls, sink.messages[0].tls) == (Verdict.DELIVERED, tls, bool(tls))
    said = [command.split()[0] for command in sink.commands[:4]]
    assert said == (["EHLO", "STARTTLS", "EHLO", "MAIL"] if tls else ["EHLO", "MAIL", "RCPT", "DATA"])


@pytest.mark.parametrize(
    ("mode", "manners", "status"),
    [
        (TlsMode.REQUIRED, Manners(), "4.7.4"),
        (TlsMode.REQUIRED, Manners(broken_tls=True), "4.7.5"),
        (TlsMode.VERIFY, Manners(), "4.7.4"),
        (TlsMode.VERIFY, showing(WRONG_NAME), "4.7.5"),
        (TlsMode.VERIFY, showing(UNKNOWN_ISSUER), "4.7.5"),
    ],
)
async def test_a_zone_is_not_content_with(bed: Bed, mode: TlsMode, manners: Manners, status: str) -> None:
    sink = await bed.sink(manners)
    reply = await refusal(bed.courier(names=names()), sink, None, replace(ZONE, tls=mode))
    assert reply.startswith(f"451 {status} ")


async def test_opportunistic_falls_back_to_clear_text_and_remembers_the_host(bed: Bed) -> None:
    sink = await bed.sink(Manners(broken_tls=True))
    clock = ManualClock()
    courier = bed.courier(names=names(), clock=clock, settings=DeliverySettings(quit_timeout=0.5))
    connections = []
    for pause in (0.0, 10.0, 3600.0, 10.0):
        clock.advance(pause)
        outcome = await deliver(courier, sink, None, replace(ZONE, max_messages_per_connection=1))
        assert (outcome.verdict, outcome.tls) == (Verdict.DELIVERED, "")
        connections.append(sink.connections)
    assert connections == [3, 4, 7, 8]  # a failed handshake costs two more, at first and after an hour
    assert not any(received.tls for received in sink.messages)


async def test_server_that_declines_starttls_goes_on_in_clear_text(bed: Bed) -> None:
    sink = await bed.sink(showing(RIGHT), script=refuse("454 4.7.0"))
    outcome = await deliver(bed.courier(names=names()), sink, None)
    assert (outcome.verdict, outcome.tls, sink.connections) == (Verdict.DELIVERED, "", 1)


def at_ehlo(number: int, reply: str) -> Script:
    """Answer the first EHLO of a sink, or the second, which comes inside TLS."""
    asked = itertools.count(1)
    return lambda verb, _: reply if verb == "EHLO" and next(asked) == number else None


async def test_capabilities_are_asked_again_inside_tls(bed: Bed) -> None:
    sink = await bed.sink(showing(RIGHT), script=at_ehlo(1, "250 sink\nSIZE 1\nSTARTTLS"))
    outcome = await deliver(bed.courier(names=names()), sink, TlsDemand(TlsMode.REQUIRED))
    assert outcome.verdict is Verdict.DELIVERED


@pytest.mark.parametrize("reply", ["421 4.7.0 too many connections", "554 5.7.1 bad reputation"])
async def test_a_host_that_refuses_us_inside_tls_is_not_asked_in_clear_text(bed: Bed, reply: str) -> None:
    sink = await bed.sink(showing(RIGHT), script=at_ehlo(2, reply))
    courier = bed.courier(names=names())
    outcome = await deliver(courier, sink, None)
    assert (outcome.verdict, outcome.scope, sink.connections) == (Verdict.DEFERRED, Scope.HOST, 1)
    assert reply in outcome.reply.text
    outcome = await deliver(courier, sink, None)
    assert (outcome.verdict, outcome.tls) == (Verdict.DELIVERED, "TLSv1.3")


async def test_long_body_through_tls_is_byte_exact(bed: Bed) -> None:
    sink = await bed.sink(showing(RIGHT))
    bodies = mail.Bodies(b".dots and text\r\n" * 200_000)
    courier = bed.courier(bodies, names=names())
    batch = make_batch(make_message(bodies.body), to(sink, TlsDemand(TlsMode.REQUIRED)))
    assert [outcome.verdict for outcome in await courier.deliver(batch)] == [Verdict.DELIVERED]
    assert sink.messages[0].body == bodies.body


# ---- resumption -----------------------------------------------------------------------------------


async def resume(courier: SmtpCourier, sink: Sink, mode: TlsMode, count: int = 1) -> None:
    """Send each message on a connection of its own."""
    for _ in range(count):
        once = replace(ZONE, tls=mode, max_messages_per_connection=1)
        outcome = await deliver(courier, sink, None, once)
        assert outcome.verdict is Verdict.DELIVERED, outcome
        while courier.pool.open_connections("default"):
            await asyncio.sleep(0)


@pytest.mark.parametrize("mode", [TlsMode.OPPORTUNISTIC, TlsMode.VERIFY])
async def test_later_connections_resume_until_a_certificate_is_wanted(bed: Bed, mode: TlsMode) -> None:
    context = RIGHT.server_context()
    sink, clock = await bed.sink(Manners(tls=context)), ManualClock()
    courier = bed.courier(names=names(), clock=clock)
    await resume(courier, sink, mode, 4)
    assert (sink.connections, context.session_stats()["hits"]) == (4, 3)
    clock.advance(plan.LIFETIME + 1)
    await resume(courier, sink, mode, 2)
    assert context.session_stats()["hits"] == 4


async def test_what_was_not_verified_is_not_resumed_where_it_must_be(bed: Bed) -> None:
    context = RIGHT.server_context()
    sink, courier = await bed.sink(Manners(tls=context)), bed.courier(names=names())
    await resume(courier, sink, TlsMode.REQUIRED)
    await resume(courier, sink, TlsMode.VERIFY)
    assert context.session_stats()["hits"] == 0


# ---- TLS from the first octet --------------------------------------------------------------------

AT_ONCE = replace(ZONE, tls_on_connect=True)


class ImplicitSink(Sink):
    """Speaks TLS from the first octet, as smarthosts do on port 465."""

    def __init__(self, made: Made) -> None:
        super().__init__()
        self._context = made.server_context()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, self.host, 0, ssl=self._context)
        self.port = self._server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("demand", "words"),
    [
        (TlsDemand(), "TLSv1.3"),
        (TlsDemand(TlsMode.REQUIRED), "TLSv1.3"),
        (VERIFY, "TLSv1.3 verified"),
        (TlsDemand(TlsMode.DANE, dane=True), "TLSv1.3 dane"),
    ],
)
async def test_tls_from_the_first_octet(bed: Bed, demand: TlsDemand, words: str) -> None:
    sink = await bed.start(ImplicitSink(RIGHT))
    results = TlsResults()
    records = {f"_{sink.port}._tcp.{HOST}": vouching(RIGHT)}
    courier = bed.courier(names=names(**records), observe_tls=results)
    outcome = await deliver(courier, sink, demand, AT_ONCE)
    assert (outcome.verdict, outcome.tls) == (Verdict.DELIVERED, words)
    assert not any(command.startswith("STARTTLS") for command in sink.commands)
    assert results.seen == [(demand.mode, "ok")]


async def test_what_is_wrong_at_the_first_octet_is_said(bed: Bed) -> None:
    sink = await bed.start(ImplicitSink(EXPIRED))
    reply = await refusal(bed.courier(names=names()), sink, VERIFY, AT_ONCE)
    assert "its certificate has expired; zone default requires a valid certificate" in reply
    sink = await bed.start(ImplicitSink(WRONG_NAME))
    reply = await refusal(bed.courier(names=names()), sink, VERIFY, AT_ONCE)
    assert f"its certificate is for elsewhere.example, another.example, not for {HOST}" in reply
    assert sink.commands == []


async def test_where_tls_comes_first_there_is_no_clear_text(bed: Bed) -> None:
    plain = await bed.sink()
    results = TlsResults()
    courier = bed.courier(names=names(), observe_tls=results)
    for _ in range(2):
        reply = await refusal(courier, plain, TlsDemand(), AT_ONCE)
        assert reply.startswith(f"451 4.7.5 TLS with {HOST} (127.0.0.1:{plain.port}) failed: ")
    assert results.seen == [("opportunistic", "failed")] * 2
    # The random bytes of a handshake may contain a line end, so the sink may take a part of it for a command.
    assert not any(command.startswith(("EHLO", "HELO")) for command in plain.commands)


class _Today(ManualClock):
    """DANE-TA looks at dates."""

    def now(self) -> float:
        return NOW


# ---- mail that demands TLS (RFC 8689), and other mail for the same hosts ----------------------------


CLEAR = Manners()
ANY_TLS = TlsDemand()


async def insist(
    courier: SmtpCourier,
    *ports: int,
    wish: bool = True,
    demand: TlsDemand | None = ANY_TLS,
    zone: ZoneSettings = ZONE,
) -> Outcome:
    route = structs.replace(route_to(*ports, host=HOST, literal=False), tls=demand)
    [outcome] = await courier.deliver(make_batch(make_message(require_tls=wish), route, zone))
    return outcome


def mail_lines(sink: Sink) -> list[str]:
    return [command for command in sink.commands if command.startswith("MAIL")]


@pytest.mark.parametrize(
    ("manners", "words"),
    [
        (CLEAR, "does not offer STARTTLS"),
        (Manners(broken_tls=True), "failed: "),
        (showing(SELF_SIGNED), "its certificate is self-signed"),
        (showing(WRONG_NAME), "its certificate is for elsewhere"),
    ],
)
@pytest.mark.parametrize("mode", [TlsMode.NONE, TlsMode.OPPORTUNISTIC])
async def test_it_waits_and_other_mail_goes(bed: Bed, mode: TlsMode, manners: Manners, words: str) -> None:
    sink, results = await bed.sink(manners), TlsResults()
    courier = bed.courier(names=names(), observe_tls=results)
    zone = replace(ZONE, tls=mode)
    assert (await insist(courier, sink.port, wish=False, demand=None, zone=zone)).verdict is Verdict.DELIVERED
    for _ in range(2):
        outcome = await insist(courier, sink.port, demand=None, zone=zone)
        assert (outcome.verdict, outcome.scope) == (Verdict.DEFERRED, Scope.MESSAGE)
        assert (outcome.host, outcome.peer) == (HOST, f"127.0.0.1:{sink.port}")
        assert outcome.counts  # an attempt of [retry]
        reply = str(outcome.reply)
        assert reply.startswith("451 4.7.30 ")
        assert words in reply
        assert reply.endswith(" the message requires a valid certificate")
        assert results.seen[-1] == ("verify", "failed")
    connections = sink.connections
    assert (await insist(courier, sink.port, wish=False, demand=None, zone=zone)).verdict is Verdict.DELIVERED
    assert sink.connections == connections  # on the idle connection of the first
    assert len(mail_lines(sink)) == len(sink.messages) == 2


async def test_a_verified_host_takes_it_and_other_mail_has_other_connections(bed: Bed) -> None:
    sink = await bed.sink(showing(RIGHT))
    courier = bed.courier(names=names())
    for wish, tls, connections in (
        (False, "TLSv1.3", 1),
        (True, "TLSv1.3 verified", 2),
        (False, "TLSv1.3", 2),
        (True, "TLSv1.3 verified", 2),
    ):
        outcome = await insist(courier, sink.port, wish=wish)
        assert (outcome.verdict, outcome.tls, sink.connections) == (Verdict.DELIVERED, tls, connections)
    narrow = replace(ZONE, max_connections_per_destination=1)  # an idle connection makes room
    for wish in (True, False, True):
        assert (await insist(courier, sink.port, wish=wish, zone=narrow)).verdict is Verdict.DELIVERED
    assert not any("REQUIRETLS" in line for line in mail_lines(sink))


@pytest.mark.parametrize("demand", [TlsDemand(TlsMode.VERIFY), TlsDemand(TlsMode.VERIFY, because="mta-sts")])
async def test_where_all_mail_is_verified_it_shares_connections(bed: Bed, demand: TlsDemand) -> None:
    good, bad = await bed.sink(showing(RIGHT)), await bed.sink(CLEAR)
    courier = bed.courier(names=names())
    for wish in (False, True):
        assert (await insist(courier, good.port, wish=wish, demand=demand)).verdict is Verdict.DELIVERED
        outcome = await insist(courier, bad.port, wish=wish, demand=demand)
        assert (outcome.scope, outcome.reply.status) == (Scope.HOST, "4.7.4")
    assert good.connections == 1


async def test_the_second_host_may_do_what_the_first_cannot(bed: Bed) -> None:
    clear, verified = await bed.sink(CLEAR), await bed.sink(showing(RIGHT))
    courier = bed.courier(names=names())
    outcome = await insist(courier, clear.port, verified.port)
    assert (outcome.verdict, outcome.tls) == (Verdict.DELIVERED, "TLSv1.3 verified")
    assert not clear.messages
    assert (await insist(courier, clear.port, verified.port, wish=False)).tls == ""
    assert len(clear.messages) == 1


async def test_a_dead_host_behind_one_in_clear_text_does_not_suspend_the_destination(bed: Bed) -> None:
    clear, dead = await bed.sink(CLEAR), await bed.sink()
    await dead.close()
    courier = bed.courier(names=names())
    outcome = await insist(courier, clear.port, dead.port)
    assert (outcome.scope, outcome.reply.status, outcome.peer) == (
        Scope.MESSAGE,
        "4.7.30",
        f"127.0.0.1:{clear.port}",
    )
    assert (await insist(courier, dead.port)).scope is Scope.HOST  # which nobody reaches


@pytest.mark.parametrize(
    "zone", [replace(ZONE, sources=("here",)), replace(ZONE, next_hop=f"[{HOST}]", next_hop_share=True)]
)
async def test_it_holds_with_sources_and_with_shared_next_hops(bed: Bed, zone: ZoneSettings) -> None:
    clear, verified = await bed.sink(CLEAR), await bed.sink(showing(RIGHT))
    here = SourceSettings(name="here", address=("127.0.0.1",))
    courier = bed.courier(names=names(), sources=mail.make_sources(ManualClock(), [here]))
    for wish in (False, True):
        outcome = await insist(courier, clear.port, wish=wish, zone=zone)
        assert (outcome.reply.status == "4.7.30") is wish
        assert (await insist(courier, verified.port, wish=wish, zone=zone)).verdict is Verdict.DELIVERED
    assert (len(clear.messages), verified.connections) == (1, 2)


async def test_records_of_dane_are_proof_enough(bed: Bed) -> None:
    sink = await bed.sink(showing(SELF_SIGNED))
    courier = bed.courier(names=names(**{f"_{sink.port}._tcp.{HOST}": vouching(SELF_SIGNED)}))
    outcome = await insist(courier, sink.port, demand=TlsDemand(dane=True))
    assert (outcome.verdict, outcome.tls) == (Verdict.DELIVERED, "TLSv1.3 dane")


def offering(*keywords: str) -> Script:
    lines = "\n".join(["250 mx", "PIPELINING", "STARTTLS", *keywords])
    return lambda verb, _: lines if verb == "EHLO" else None


async def test_a_host_that_knows_the_wish_is_told(bed: Bed) -> None:
    sink = await bed.sink(showing(RIGHT), script=offering("REQUIRETLS"))
    courier = bed.courier(names=names())
    for wish in (True, False):
        assert (await insist(courier, sink.port, wish=wish)).verdict is Verdict.DELIVERED
    assert mail_lines(sink) == ["MAIL FROM:<sender@example.org> REQUIRETLS", "MAIL FROM:<sender@example.org>"]


# ---- hosts that answer a small first message of TLS only -------------------------------------------


QUICK = DeliverySettings(starttls_timeout=0.5)
_GROUPS = b"\x00\x0a"


def groups_in(hello: bytes) -> int:
    """The number of groups in a ClientHello (RFC 8446 4.1.2) that begins with its record."""
    at = 5 + 4 + 2 + 32
    at += 1 + hello[at]
    at += 2 + int.from_bytes(hello[at : at + 2])
    at += 1 + hello[at] + 2
    while at < len(hello):
        kind, size = hello[at : at + 2], int.from_bytes(hello[at + 2 : at + 4])
        if kind == _GROUPS:
            return (size - 2) // 2
        at += 4 + size
    return 0


class Firewall:
    """Stands in front of a host and drops, or cuts, connections whose ClientHello has several groups."""

    def __init__(self, port: int, *, cuts: bool, drops_all: bool = False) -> None:
        self._port, self._cuts, self._drops_all = port, cuts, drops_all
        self.hellos: list[int] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_host, to_host = await asyncio.open_connection("127.0.0.1", self._port)
        back = asyncio.ensure_future(self._forward(from_host, writer))
        is_hello = False
        try:
            while data := await reader.read(65536):
                if is_hello:
                    self.hellos.append(groups_in(data))
                    if self.hellos[-1] > 1 or self._drops_all:
                        if not self._cuts:
                            await reader.read()
                        return
                is_hello = data == b"STARTTLS\r\n"
                to_host.write(data)
        finally:
            back.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await back
            to_host.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()


@pytest.mark.parametrize("cuts", [True, False])
@pytest.mark.parametrize("mode", [TlsMode.OPPORTUNISTIC, TlsMode.REQUIRED])
async def test_a_host_that_takes_a_small_one_is_remembered(bed: Bed, mode: TlsMode, cuts: bool) -> None:
    sink = await bed.sink(showing(RIGHT))
    firewall = Firewall(sink.port, cuts=cuts)
    route = route_to(await bed.peer(firewall.serve), host=HOST, literal=False)
    clock = ManualClock()
    courier = bed.courier(names=names(), settings=QUICK, clock=clock)
    zone = replace(ZONE, tls=mode, max_messages_per_connection=1)
    for _ in range(2):
        [outcome] = await courier.deliver(make_batch(make_message(), route, zone))
        assert (outcome.verdict, outcome.tls) == (Verdict.DELIVERED, "TLSv1.3"), outcome.reply
    assert [each > 1 for each in firewall.hellos] == [True, False, False]
    clock.advance(plan.SMALL_FOR + 1)
    await courier.deliver(make_batch(make_message(), route, zone))
    assert [each > 1 for each in firewall.hellos[3:]] == [True, False]


async def test_a_host_that_answers_neither_is_no_host_for_small_ones(bed: Bed) -> None:
    sink = await bed.sink(showing(RIGHT))
    firewall = Firewall(sink.port, cuts=True, drops_all=True)
    route = route_to(await bed.peer(firewall.serve), host=HOST, literal=False)
    courier = bed.courier(names=names(), settings=QUICK)
    zone = replace(ZONE, tls=TlsMode.REQUIRED)
    for _ in range(2):
        [outcome] = await courier.deliver(make_batch(make_message(), route, zone))
        assert outcome.verdict is Verdict.DEFERRED
    assert [each > 1 for each in firewall.hellos] == [True, False] * 2
