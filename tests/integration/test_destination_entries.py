"""What is demanded of a destination, by [[destination]] and by MTA-STS, from a client to the hosts."""

import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from tests.support.certificates import make
from tests.support.dns import FakeDns, Records
from tests.support.https import HttpsServer, Page
from tests.support.relay import LOOPBACK, Running, relay_with, settings
from tests.support.sink import Sink
from tests.support.sink_conversation import Manners
from zonerelay.cli.operate.explain import _facts as explain_facts
from zonerelay.config.settings import DestinationSettings, RetrySettings, TlsMode, ZoneSettings
from zonerelay.routing.mta_sts import HTTPS_PORT

HOST = "mx.provider.example"
MESSAGE = b"From: app@example.org\r\nSubject: hello\r\n\r\nOne line.\r\n"
# Fails once and then waits: what happened is seen, and nothing happens twice.
PATIENT = RetrySettings(schedule=(600.0,), jitter=0.0)


def entry(**options: object) -> DestinationSettings:
    return DestinationSettings(**options)  # type: ignore[arg-type]  # options by name


class Provider:
    """A host that takes the mail of strict.example and plain.example, its DNS, and a relay before it."""

    mta_sts = False
    policy_port = HTTPS_PORT

    def __init__(self, directory: Path, dns: FakeDns, sink: Sink) -> None:
        self.directory = directory
        self.dns = dns
        self.sink = sink

    @asynccontextmanager
    async def relay(self, *destination: DestinationSettings, **zone: object) -> AsyncIterator[Running]:
        options = {"port": self.sink.port, "allow_private_addresses": True, "mta_sts": self.mta_sts, **zone}
        chosen = settings(
            self.directory,
            zone=ZoneSettings(**options),  # type: ignore[arg-type]  # options by name
            dns=self.dns.address,
            destination=destination,
            retry=PATIENT,
        )
        async with relay_with(chosen, policy_port=self.policy_port) as running:
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


# ---- MTA-STS: real certificates, a real policy server, scripted DNS ---------------------------------


DOMAIN = "example.com"
MX = "mx.example.com"
TO = f"ann@{DOMAIN}"
PAGE = "/.well-known/mta-sts.txt"
WEEK = 604_800


def policy(mx: str = MX, *, mode: str = "enforce", max_age: int = WEEK) -> Page:
    return Page(f"version: STSv1\nmode: {mode}\nmx: {mx}\nmax_age: {max_age}\n")


def records() -> dict[str, Records]:
    return {
        DOMAIN: {"MX": [f"10 {MX}"]},
        MX: {"A": [LOOPBACK]},
        f"mta-sts.{DOMAIN}": {"A": [LOOPBACK]},
        f"_mta-sts.{DOMAIN}": {"TXT": ['"v=STSv1; id=1;"']},
    }


class World(Provider):
    """A domain with its MX host, its policy server and its DNS, and a relay that sends there."""

    mta_sts = True

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        super().__init__(directory, FakeDns(records()), Sink())
        self._stack = stack
        self.authority = trustme.CA()
        self.web = HttpsServer(self.authority, f"mta-sts.{DOMAIN}")
        self.web.pages[PAGE] = policy()
        self.held = directory / "mta-sts" / f"{DOMAIN}.json"

    async def start(self, manners: Manners | None = None) -> None:
        for server in (self.dns, self.web, self.sink):
            await self._stack.enter_async_context(server)
        self.policy_port = self.web.port
        self.sink.manners = manners or self.manners(MX)

    def manners(self, *names: str, authority: trustme.CA | None = None) -> Manners:
        return Manners(tls=context(authority or self.authority, *names))


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        world = World(tmp_path, stack)
        monkeypatch.setenv("SSL_CERT_FILE", str(world.web.trust(tmp_path)))
        yield world


async def delivered(running: Running) -> Mapping[str, object]:
    await running.send("app@example.org", [TO], MESSAGE)
    return (await running.until_logged("delivered"))[-1]


async def deferred(running: Running) -> str:
    await running.send("app@example.org", [TO], MESSAGE)
    [line] = await running.until_logged("deferred")
    assert running.log.named("delivered") == []
    return str(line["reply"])


# ---- who passes ------------------------------------------------------------------------------------


async def test_a_host_of_the_policy_with_a_valid_certificate_gets_the_mail(world: World) -> None:
    await world.start()
    async with world.relay() as running:
        assert (await delivered(running))["tls"] == "TLSv1.3 mta-sts"
        assert world.web.asked == [(f"mta-sts.{DOMAIN}", "GET", PAGE)]
        [fetched] = running.log.named("mta-sts-policy")
        assert (fetched["domain"], fetched["mode"], fetched["policy"]) == (DOMAIN, "enforce", "1")
        metrics = running.metrics()
        assert 'zonerelay_mta_sts_lookups_total{result="enforce"} 1.0' in metrics
        assert 'zonerelay_mta_sts_fetches_total{result="fetched"} 1.0' in metrics
    assert json.loads(world.held.read_text())["patterns"] == [MX]


async def test_without_the_option_nobody_is_asked(world: World) -> None:
    await world.start()
    async with world.relay(mta_sts=False) as running:
        await delivered(running)
    assert world.web.asked == []
    assert world.dns.count(f"_mta-sts.{DOMAIN}", "TXT") == 0
    assert not world.held.parent.exists()


async def test_only_the_hosts_of_the_policy_are_used(world: World) -> None:
    world.dns.zones[DOMAIN] = {"MX": ["5 evil.example.net", f"10 {MX}"]}
    world.dns.zones["evil.example.net"] = {"A": [LOOPBACK]}
    await world.start()
    async with world.relay() as running:
        assert (await delivered(running))["host"] == MX
        [line] = running.log.named("mta-sts-mismatch")
        assert (line["hosts"], line["mode"]) == ("evil.example.net", "enforce")
        metrics = running.metrics()
        assert 'zonerelay_mta_sts_mismatches_total{mode="enforce"} 1.0' in metrics


# ---- who fails -------------------------------------------------------------------------------------


@pytest.mark.parametrize("certificate", ["another name", "another authority"])
async def test_a_host_whose_certificate_is_not_for_it_gets_nothing(world: World, certificate: str) -> None:
    await world.start(
        world.manners("mx.example.net")
        if certificate == "another name"
        else world.manners(MX, authority=trustme.CA())
    )
    async with world.relay() as running:
        assert "451 4.7." in await deferred(running)
    assert world.sink.messages == []


async def test_hosts_that_the_policy_does_not_name_get_nothing_and_the_mail_waits(world: World) -> None:
    world.web.pages[PAGE] = policy("*.example.net")
    await world.start()
    async with world.relay() as running:
        reply = await deferred(running)
        assert reply == (
            f"451 4.7.5 the MTA-STS policy 1 of {DOMAIN} does not include any of its MX hosts: {MX}"
        )
    assert world.sink.connections == 0


async def test_a_policy_from_a_server_that_is_not_the_domains_counts_for_nothing(world: World) -> None:
    world.web.show_certificate_for("mta-sts.example.net")
    await world.start(Manners())
    async with world.relay() as running:
        assert (await delivered(running))["tls"] == ""
        [line] = running.log.named("mta-sts-failed")
        assert f"the certificate of mta-sts.{DOMAIN} is not trusted" in str(line["problem"])
        assert "kept_until" not in line
    assert world.web.asked == []


# ---- who tries to talk the relay out of it ----------------------------------------------------------


async def test_starttls_that_is_stripped_gets_no_mail(world: World) -> None:
    await world.start(Manners())
    async with world.relay() as running:
        assert "451 4.7.4" in await deferred(running)
    assert world.sink.messages == []


# ---- [[destination]] has the last word ----------------------------------------------------------------


async def test_a_destination_with_tls_of_its_own_overrides_the_policy(world: World) -> None:
    world.web.pages[PAGE] = Page(policy("mx.example.net").body, delay=3)
    await world.start(Manners())
    entry = DestinationSettings(domain=(DOMAIN,), tls=TlsMode.OPPORTUNISTIC)
    async with world.relay(entry) as running:
        started = time.monotonic()
        assert (await delivered(running))["tls"] == ""
        assert time.monotonic() - started < 2  # nobody waited for the policy


async def test_a_zone_that_verifies_keeps_its_own_demand_and_the_policys_hosts(world: World) -> None:
    world.web.pages[PAGE] = policy("mx.example.net")
    await world.start()
    async with world.relay(tls=TlsMode.VERIFY) as running:
        assert "451 4.7.5 the MTA-STS policy" in await deferred(running)


async def test_domains_at_one_host_with_other_demands_share_its_limit_alone(world: World) -> None:
    """example.com has a policy, example.net at the same host has none; one connection at a time."""
    world.dns.zones["example.net"] = {"MX": [f"10 {MX}"]}
    await world.start()
    async with world.relay(max_connections_per_destination=1, connection_idle_timeout=30.0) as running:
        for at in range(3):
            await running.send("app@example.org", [TO], MESSAGE)
            await running.send("app@example.org", ["bob@example.net"], MESSAGE)
            await running.until_logged("delivered", count=2 * at + 2)
        assert world.sink.open_peak == 1
        assert world.sink.connections > 1
    carried = {(received.peer, received.recipients[0].partition("@")[2]) for received in world.sink.messages}
    assert len(world.sink.messages) == 6
    assert len(carried) == len({peer for peer, _ in carried}) == world.sink.connections


async def test_explain_names_the_policy_and_what_it_demands(world: World) -> None:
    await world.start()
    async with world.relay() as running:
        found = await running.explain(TO)
        assert (found.tls, found.tls_demand and found.tls_demand.because) == ("verify", "mta-sts")
        assert found.mta_sts is not None
        assert (found.mta_sts.mode, found.mta_sts.policy, found.mta_sts.mx) == ("enforce", "1", (MX,))
        shown = "\n".join(str(cell) for row in explain_facts(found, time.time()) for cell in row)
        assert "because of the domain's MTA-STS policy" in shown
        assert "enforce, policy 1 until 20" in shown
    assert world.sink.connections == 0
