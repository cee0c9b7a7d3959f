"""MTA-STS: records and policies as texts (RFC 8461 3 and 4.1), and policies that are kept over days."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zonerelay.config.settings import DestinationSettings, TlsMode, ZoneSettings
from zonerelay.model.clock import ManualClock
from zonerelay.model.reply import Reply, Scope, Verdict
from zonerelay.process.webclient import Resolve, Response, WebError
from zonerelay.routing import mta_sts
from zonerelay.routing import mta_sts as sts_policies
from zonerelay.routing.destinations.mx import DestinationEntry, DestinationTable, by_policy
from zonerelay.routing.destinations.route import MxHost, Route, TlsDemand, Unroutable
from zonerelay.routing.dns.answers import Addresses, DnsAnswer, DnsStatus
from zonerelay.routing.dns.resolver import Resolver
from zonerelay.routing.mta_sts import RETRY_AFTER, PolicyLookup, StsMode, StsPolicy, parse_policy
from zonerelay.telemetry.events.events import Events

DAY = 86_400
GOOD = "version: STSv1\nmode: enforce\nmx: mx1.example.com\nmx: *.example.net\nmax_age: 604800\n"


def policy(*patterns: str, mode: StsMode = StsMode.ENFORCE, max_age: int = DAY) -> StsPolicy:
    return StsPolicy(mode, patterns, max_age)


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        (["v=STSv1; id=20260101T000000;"], "20260101T000000"),
        (["v=STSv1;id=a"], "a"),
        (["v=STSv1 ; id=abc ; note=more; x-y.z_1=*"], "abc"),
        (["v=spf1 -all", "v=STSv1; id=1;", "v=STSv2; id=2;"], "1"),
        ([], ""),
        (["v=STSv1; id=1;", "v=STSv1; id=2;"], ""),  # RFC 8461 3.1: one, or none
        (["v=STSv1;"], ""),
        (["v=STSv1; id=;"], ""),
        (["v=STSv1; id=1; id=2;"], ""),
        (["v=STSv1; id=" + "1" * 33], ""),
        (["v=STSv1; id=2026-01-01;"], ""),
        (["v=STSv1; nonsense; id=1"], ""),
        (["V=STSv1; id=1"], ""),
        ([" v=STSv1; id=1"], ""),
        (["v=STSv12; id=1"], ""),
    ],
)
def test_a_record_has_one_id_or_says_nothing(texts: list[str], wanted: str) -> None:
    assert mta_sts.record_id(texts) == wanted


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_a_policy_is_read_with_either_line_end(ends: str) -> None:
    found = parse_policy(GOOD.replace("\n", ends).encode())
    assert found == policy("mx1.example.com", "*.example.net", max_age=604_800)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("version: STSv1\nmode: none\nmax_age: 0", policy(mode=StsMode.NONE, max_age=0)),
        # Of fields that are there twice the first counts, and what nobody knows is passed over.
        (
            "mode:testing\nmode: enforce\nversion: STSv1\t\nmx:a.example\nnew: 1\nmax_age:10\nmax_age:2\n\n",
            policy("a.example", mode=StsMode.TESTING, max_age=10),
        ),
        (
            GOOD.replace("604800", "9999999999"),
            policy("mx1.example.com", "*.example.net", max_age=mta_sts.MAX_LIFE),
        ),
        (
            GOOD.replace("mx1.example.com", "MX1.Bücher.example"),
            policy("mx1.xn--bcher-kva.example", "*.example.net", max_age=604_800),
        ),
    ],
)
def test_a_policy_may_be_written_in_many_ways(text: str, wanted: StsPolicy) -> None:
    assert parse_policy(text.encode()) == wanted


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "version"),
        ("<html>", "invalid line"),
        (GOOD.replace("STSv1", "STSv2"), "version"),
        (GOOD.replace("enforce", "Enforce"), "mode"),
        (GOOD.replace("mode: enforce\n", ""), "mode"),
        (GOOD.replace("604800", "-1"), "max_age"),
        (GOOD.replace("604800", "7d"), "max_age"),
        (GOOD.replace("604800", "12345678901"), "max_age"),
        (GOOD.replace("mx: *.example.net", "mx: .example.net"), "not a host name"),
        (GOOD.replace("mx: *.example.net", "mx: *.*.example.net"), "not a host name"),
        (GOOD.replace("mx: *.example.net", "mx: m*.example.net"), "not a host name"),
        ("version: STSv1\nmode: testing\nmax_age: 10\n", "the policy contains no mx"),
        (GOOD + "mx: m.example\n" * mta_sts.MAX_PATTERNS, "more than"),
    ],
)
def test_what_is_no_policy_is_refused_in_words(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_policy(text.encode())


def test_octets_that_are_no_text_are_refused() -> None:
    with pytest.raises(ValueError, match="UTF-8"):
        parse_policy(GOOD.encode() + b"\xff")


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("mx1.example.com", True),
        ("mx2.example.com", False),
        ("a.example.net", True),
        ("a.b.example.net", False),  # one label, RFC 8461 4.1
        ("example.net", False),
        (".example.net", False),
        ("net", False),
    ],
)
def test_a_wildcard_stands_for_one_label(host: str, *, allowed: bool) -> None:
    assert policy("mx1.example.com", "*.example.net").allows(host) is allowed


@pytest.mark.parametrize(
    ("max_age", "refresh", "expires"),
    [(7 * DAY, DAY, 7 * DAY), (DAY, DAY / 2, DAY), (0, mta_sts.MIN_LIFE / 2, mta_sts.MIN_LIFE)],
)
def test_a_policy_is_refreshed_in_a_day_or_half_life(max_age: int, refresh: float, expires: float) -> None:
    held = mta_sts.CachedPolicy.of("example.com", "1", policy("a.example", max_age=max_age), fetched=1000.0)
    assert (held.refresh_from, held.expires) == (1000 + refresh, 1000 + expires)


PIECES = st.sampled_from(
    ["version:", " STSv1", "mode:", "enforce", "mx:", "*.", "a.example", "max_age:", "9", "\n", "\r"]
)


@given(
    st.one_of(
        st.binary(max_size=200), st.lists(PIECES, max_size=30).map(lambda parts: "".join(parts).encode())
    )
)
def test_whatever_a_server_sends_is_a_policy_or_is_refused(body: bytes) -> None:
    try:
        found = parse_policy(body)
    except ValueError as error:
        complaint = str(error)
    else:
        complaint = ""
        assert 0 <= found.max_age <= mta_sts.MAX_LIFE
        assert found.patterns or found.mode is StsMode.NONE
    assert len(complaint) < 200


@given(st.lists(st.text(max_size=60).map(lambda text: f"v=STSv1;{text}"), max_size=2))
def test_whatever_is_in_a_record_is_an_id_or_none(texts: list[str]) -> None:
    found = mta_sts.record_id(texts)
    assert found == "" or found.isalnum()


# Policies over days, with a clock that is turned by hand


DOMAIN = "example.com"
ZONE = ZoneSettings()
TXT_TTL = 300.0
URL = "https://mta-sts.example.com/.well-known/mta-sts.txt"


def text(mode: str = "enforce", mx: str = "mx.example.com", max_age: float = 7 * DAY) -> bytes:
    return f"version: STSv1\r\nmode: {mode}\r\nmx: {mx}\r\nmax_age: {max_age:.0f}\r\n".encode()


def page(body: bytes, *, status: int = 200, content_type: str = "text/plain; charset=us-ascii") -> Response:
    return Response(status, {"content-type": content_type}, body)


@dataclass
class Domain:
    """What DNS and the policy's server say today."""

    clock: ManualClock
    id: str = "1"
    dns: DnsStatus = DnsStatus.OK
    answer: Response | Exception = field(default_factory=lambda: page(text()))
    ips: tuple[str, ...] = ("8.8.8.8",)
    gate: asyncio.Event | None = None
    fetched: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    async def lookup(self, name: str, kind: object) -> DnsAnswer[str]:
        self.asked.append(name)
        records = (f"v=STSv1; id={self.id};",) if self.dns is DnsStatus.OK and self.id else ()
        return DnsAnswer(self.dns, records, self.clock.monotonic() + TXT_TTL)

    async def addresses(self, name: str, *, ipv6: bool) -> Addresses:
        if self.ips:
            return Addresses(self.ips)
        return Addresses((), Reply(451, "4.4", f"no address of {name}"))

    async def fetch(self, url: str, *, timeout: float, max_size: int, resolve: Resolve) -> Response:
        assert (timeout, max_size) == (sts_policies.FETCH_TIMEOUT, mta_sts.MAX_POLICY)
        self.fetched.append(url)
        await resolve(url.split("/")[2])
        if self.gate is not None:
            await self.gate.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@dataclass
class Log:
    lines: list[str] = field(default_factory=list)

    def sts_looked_up(self, result: str) -> None:
        self.lines.append(f"looked up: {result}")

    def sts_fetched(self, domain: str, *, mode: str, policy_id: str, expires: float) -> None:
        self.lines.append(f"fetched: {mode} {policy_id}")

    def sts_failed(self, domain: str, problem: str, *, kept_until: float | None) -> None:
        self.lines.append(f"failed, {'kept' if kept_until else 'none kept'}: {problem}")

    def sts_mismatch(self, domain: str, hosts: Sequence[str], *, mode: str) -> None:
        self.lines.append(f"mismatch: {mode} {' '.join(hosts)}")

    def sts_files(self, problem: str) -> None:
        self.lines.append(f"files: {problem}")

    def of_fetches(self) -> list[str]:
        return [line for line in self.lines if line.startswith(("fetched", "failed"))]


class Stage:
    def __init__(self, directory: Path) -> None:
        self.clock = ManualClock()
        self.domain = Domain(self.clock)
        self.log = Log()
        self.directory = directory / "mta-sts"
        self.policies = self.start()

    def start(self) -> mta_sts.StsPolicies:
        self.policies = mta_sts.StsPolicies(
            cast(Resolver, self.domain),
            cast(Events, self.log),
            self.clock,
            files=mta_sts.StsFiles(self.directory),
            fetch=self.domain.fetch,
        )
        return self.policies

    async def look_up(self, zone: ZoneSettings = ZONE) -> PolicyLookup:
        return await self.policies.look_up(zone, DOMAIN)

    async def settle(self) -> None:
        """Let what runs in the background end."""
        for _ in range(200):
            await asyncio.sleep(0)
            if not self.policies._fetching:
                return
            await asyncio.sleep(0.001)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def id_of(found: PolicyLookup) -> str:
    return "" if found.held is None else found.held.id


async def test_a_policy_is_fetched_once_and_counts_until_its_record_is_looked_up_again(stage: Stage) -> None:
    found = await stage.look_up()
    assert found.held is not None
    assert found.held.allows("mx.example.com")
    assert found.expires == stage.clock.now() + TXT_TTL
    assert await stage.look_up() == found
    assert stage.domain.asked == ["_mta-sts.example.com"] * 2
    assert stage.domain.fetched == [URL]
    assert stage.log.lines == ["fetched: enforce 1", "looked up: enforce", "looked up: enforce"]


async def test_no_record_means_no_policy_and_nothing_is_fetched(stage: Stage) -> None:
    stage.domain.dns = DnsStatus.NXDOMAIN
    assert await stage.look_up() == PolicyLookup(None, stage.clock.now() + TXT_TTL)
    stage.domain.dns = DnsStatus.TIMEOUT
    found = await stage.look_up()
    assert found.held is None
    assert found.problem == "TXT of the domain: no name server responded in time"
    assert stage.domain.fetched == []
    assert stage.log.lines == ["looked up: absent", "looked up: failed"]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (WebError("nobody there"), "nobody there"),
        (page(text(), status=404), "mta-sts.example.com returned status 404"),
        (page(b"", status=301), "mta-sts.example.com returned status 301"),
        (page(text(), content_type="text/html"), "mta-sts.example.com did not return text/plain"),
        (page(text(mode="maybe")), "the policy has no valid mode: 'maybe'"),
        (RuntimeError("a bug"), "internal error: RuntimeError"),
    ],
)
async def test_a_policy_that_cannot_be_had_is_none_for_five_minutes(
    stage: Stage, answer: Response | Exception, problem: str
) -> None:
    stage.domain.answer = answer
    found = await stage.look_up()
    assert found == PolicyLookup(None, stage.clock.now() + RETRY_AFTER, problem)
    stage.domain.answer = page(text())
    stage.clock.advance(RETRY_AFTER - 1)
    assert (await stage.look_up()).held is None
    assert len(stage.domain.fetched) == 1
    stage.clock.advance(2)
    assert id_of(await stage.look_up()) == "1"
    assert stage.log.of_fetches() == [f"failed, none kept: {problem}", "fetched: enforce 1"]


@pytest.mark.parametrize(("ips", "problem"), [((), "no address of"), (("127.0.0.1", "10.0.0.1"), "private")])
async def test_a_private_server_is_not_asked(stage: Stage, ips: tuple[str, ...], problem: str) -> None:
    stage.domain.ips = ips
    assert problem in (await stage.look_up()).problem
    if ips:
        stage.clock.advance(RETRY_AFTER + 1)
        assert id_of(await stage.look_up(ZoneSettings(allow_private_addresses=True))) == "1"


@pytest.mark.parametrize("trouble", ["record gone", "dns silent", "server down", "all of it"])
async def test_who_suppresses_answers_gains_nothing_over_a_policy(stage: Stage, trouble: str) -> None:
    await stage.look_up()
    if trouble in ("server down", "all of it"):
        stage.domain.answer = WebError("down")
    if trouble != "server down":
        stage.domain.dns = DnsStatus.NXDOMAIN if trouble == "record gone" else DnsStatus.TIMEOUT
    while stage.clock.now() < 1_700_000_000 + 7 * DAY - 7200:
        stage.clock.advance(3600)
        assert id_of(await stage.look_up()) == "1"
        await stage.settle()
    stage.clock.advance(7200)
    found = await stage.look_up()
    # Where the server answers, it was asked again in time, with or without a record.
    assert (found.held is None) is (trouble in ("server down", "all of it"))


async def test_an_expired_policy_whose_server_is_down_is_none(stage: Stage) -> None:
    await stage.look_up()
    stage.domain.answer = WebError("down")
    stage.clock.advance(7 * DAY - 1)
    found = await stage.look_up()
    assert found.expires == stage.clock.now() + 1  # no route outlives its policy
    await stage.settle()
    stage.clock.advance(RETRY_AFTER + 1)
    found = await stage.look_up()
    assert (found.held, found.problem) == (None, "down")
    assert stage.log.of_fetches()[1:] == ["failed, kept: down", "failed, none kept: down"]


async def test_a_new_id_is_waited_for(stage: Stage) -> None:
    await stage.look_up()
    stage.domain.id, stage.domain.answer = "2", page(text(mx="mx.example.net"))
    found = await stage.look_up()
    assert found.held is not None
    assert found.held.id == "2"
    assert found.held.allows("mx.example.net")


async def test_a_new_id_without_its_policy_leaves_the_old_one_in_force(stage: Stage) -> None:
    await stage.look_up()
    stage.domain.id, stage.domain.answer = "2", WebError("down")
    for _ in range(3):
        assert id_of(await stage.look_up()) == "1"
    assert len(stage.domain.fetched) == 2
    stage.domain.answer = page(text())
    stage.clock.advance(RETRY_AFTER + 1)
    assert id_of(await stage.look_up()) == "2"


async def test_a_policy_is_refreshed_in_the_background_when_it_is_a_day_old(stage: Stage) -> None:
    await stage.look_up()
    stage.clock.advance(DAY - 1)
    await stage.look_up()
    assert len(stage.domain.fetched) == 1
    stage.domain.gate = asyncio.Event()
    stage.clock.advance(2)
    before = await stage.look_up()  # does not wait
    stage.domain.gate.set()
    await stage.settle()
    after = await stage.look_up()
    assert before.held is not None
    assert after.held is not None
    assert after.held.expires == before.held.expires + DAY + 1
    assert len(stage.domain.fetched) == 2


async def test_a_refresh_that_fails_is_not_tried_with_every_message(stage: Stage) -> None:
    await stage.look_up()
    stage.domain.answer = WebError("down")
    stage.clock.advance(DAY + 1)
    for _ in range(5):
        await stage.look_up()
        await stage.settle()
    assert len(stage.domain.fetched) == 2


async def test_equal_questions_wait_for_one_fetch(stage: Stage) -> None:
    stage.domain.gate = asyncio.Event()
    asking = [asyncio.create_task(stage.look_up()) for _ in range(20)]
    await asyncio.sleep(0.01)
    asking[0].cancel()  # takes nothing from the others
    stage.domain.gate.set()
    found = await asyncio.gather(*asking[1:])
    assert {id_of(each) for each in found} == {"1"}
    assert len(stage.domain.fetched) == 1


async def test_mail_waits_briefly_for_a_new_policy(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sts_policies, "FIRST_WAIT", 0.01)
    stage.domain.gate = asyncio.Event()
    found = await stage.look_up()
    assert found.held is None
    assert found.problem == "its policy is still being fetched"
    assert found.expires == stage.clock.now() + sts_policies.PENDING_LIFE
    stage.domain.gate.set()
    await stage.settle()
    assert id_of(await stage.look_up()) == "1"
    assert len(stage.domain.fetched) == 1


async def test_a_fetch_ends_whatever_the_server_does(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sts_policies, "FETCH_TIMEOUT", 0.01)
    stage.domain.gate = asyncio.Event()
    assert (await stage.look_up()).problem == "no response within 0.01 s"


async def test_a_failure_does_not_count_longer_after_the_clock_was_set_back(stage: Stage) -> None:
    stage.domain.answer = WebError("down")
    assert (await stage.look_up()).problem == "down"
    stage.domain.answer = page(text())
    stage.clock.step(-DAY)
    assert id_of(await stage.look_up()) == "1"


async def test_a_fetch_that_had_to_wait_has_not_failed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sts_policies, "FETCH_TIMEOUT", 0.01)
    stage.policies._slots = asyncio.Semaphore(0)
    assert (await stage.look_up()).problem == "its policy is still being fetched"
    assert not stage.log.of_fetches()
    stage.policies._slots.release()
    assert id_of(await stage.look_up()) == "1"


async def test_what_is_fetched_at_the_end_is_given_up(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sts_policies, "FIRST_WAIT", 0.01)
    stage.domain.gate = asyncio.Event()
    await stage.look_up()
    await stage.policies.close()
    assert stage.log.of_fetches() == []


async def test_a_policy_survives_a_restart_and_its_age_counts_on(stage: Stage) -> None:
    await stage.look_up()
    await stage.settle()
    stage.domain.answer = WebError("down")
    stage.domain.dns = DnsStatus.TIMEOUT
    stage.clock.advance(7 * DAY - 10)
    stage.start()
    assert id_of(await stage.look_up()) == "1"
    await stage.settle()
    stage.clock.advance(11)
    stage.start()
    assert id_of(await stage.look_up()) == ""
    assert list(stage.directory.iterdir()) == []


@pytest.mark.parametrize(
    "contents",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"{}",
        json.dumps({"domain": "example.com", "id": "1"}).encode(),
        b"x" * 100_000,
        b"[" * 30_000,
    ],
)
async def test_a_file_that_makes_no_sense_is_named_and_passed_over(stage: Stage, contents: bytes) -> None:
    stage.directory.mkdir()
    (stage.directory / "example.com.json").write_bytes(contents)
    (stage.directory / "tmpabc.new").write_bytes(b"half a pol")
    assert id_of(await stage.look_up()) == "1"
    assert stage.log.lines[0].startswith(f"files: {stage.directory}/example.com.json: ")
    await stage.settle()
    assert [path.name for path in stage.directory.iterdir()] == ["example.com.json"]
    stage.start()
    stage.domain.answer = WebError("down")
    assert id_of(await stage.look_up()) == "1"


async def test_a_file_of_another_domain_or_from_the_future_gives_no_policy_that_lasts(stage: Stage) -> None:
    await stage.look_up()
    await stage.settle()
    file = stage.directory / "example.com.json"
    fields = json.loads(file.read_text())
    (stage.directory / "example.net.json").write_text(json.dumps(fields))
    file.write_text(json.dumps(fields | {"fetched": stage.clock.now() + 1000 * DAY}))
    stage.start()
    found = await stage.look_up()
    assert found.held is not None
    assert found.held.fetched == stage.clock.now()
    assert any("example.net.json: not the policy of this domain" in line for line in stage.log.lines)


async def test_a_directory_that_cannot_be_written_costs_no_mail(stage: Stage) -> None:
    stage.directory.parent.joinpath("mta-sts").write_text("a file where the directory should be")
    assert id_of(await stage.look_up()) == "1"
    await stage.settle()
    assert [line.partition(" ")[0] for line in stage.log.lines].count("files:") == 2


async def test_policies_that_are_not_used_make_room(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sts_policies, "MAX_POLICIES", 3)
    for at in range(5):
        await stage.policies.look_up(ZONE, f"d{at}.example")
        await stage.policies.look_up(ZONE, "d0.example")
        await stage.settle()
    names = sorted(path.name for path in stage.directory.iterdir())
    assert names == ["d0.example.json", "d3.example.json", "d4.example.json"]
    stage.start()
    monkeypatch.setattr(sts_policies, "MAX_POLICIES", 2)
    stage.domain.answer = WebError("down")
    found = [await stage.policies.look_up(ZONE, f"d{at}.example") for at in (0, 3, 4)]
    assert sum(each.held is not None for each in found) == 2


async def test_a_domain_that_is_too_long_for_a_record_has_no_policy(stage: Stage) -> None:
    domain = ".".join(["a" * 60] * 4) + ".example"
    assert (await stage.policies.look_up(ZONE, domain)).held is None
    assert stage.domain.asked == []


# The terms of a route by the domain's MTA-STS policy, the zone and [[destination]]: who has the say


CLOCK = ManualClock()
NOW = CLOCK.now()
HOSTS = ("mx1.example.com", "mx2.example.com", "evil.example.net")
STS = TlsDemand(TlsMode.VERIFY, because="mta-sts")


class Mismatches:
    def __init__(self) -> None:
        self.hosts: list[str] = []

    def sts_mismatch(self, domain: str, hosts: Sequence[str], *, mode: str) -> None:
        self.hosts += hosts


def judged(
    policy_of: StsPolicy | None,
    *,
    zone: ZoneSettings | None = None,
    entry: DestinationEntry | None = None,
    secure: bool = False,
    expires: float = 100.0,
    mismatches: Mismatches | None = None,
) -> Route | Unroutable:
    hosts = tuple(MxHost(host, 25, at) for at, host in enumerate(HOSTS))
    route = Route("default", "example.com", hosts, NOW + 300, secure=secure)
    held = None if policy_of is None else mta_sts.CachedPolicy.of("example.com", "7", policy_of, NOW)
    events = cast(Events, mismatches or Mismatches())
    return by_policy(zone or ZoneSettings(), route, entry, PolicyLookup(held, NOW + expires), events)


def policy_of(*patterns: str, mode: StsMode = StsMode.ENFORCE) -> StsPolicy:
    return StsPolicy(mode, patterns or ("*.example.com",), 86_400)


def entry(**options: object) -> DestinationEntry:
    table = DestinationTable((DestinationSettings(**options),))  # type: ignore[arg-type]  # options by name
    met = table.find("default", "example.com", ())
    assert met is not None
    return met


def test_the_hosts_of_the_policy_remain_in_their_order_and_must_be_verified() -> None:
    mismatches = Mismatches()
    route = judged(policy_of(), mismatches=mismatches)
    assert isinstance(route, Route)
    assert [host.name for host in route.hosts] == ["mx1.example.com", "mx2.example.com"]
    assert (route.tls, route.terms, route.limits) == (STS, "mta-sts", None)
    assert mismatches.hosts == ["evil.example.net"]


def test_no_route_outlives_what_is_known_of_the_policy() -> None:
    assert judged(policy_of()).expires == NOW + 100
    assert judged(None).expires == NOW + 100
    assert judged(policy_of("other.example")).expires == NOW + 100
    assert judged(policy_of(), expires=1000).expires == NOW + 300


def test_without_a_host_of_the_policy_mail_waits_and_the_policy_is_named() -> None:
    found = judged(policy_of("mx.example.org"))
    assert isinstance(found, Unroutable)
    assert (found.outcome.verdict, found.outcome.scope) == (Verdict.DEFERRED, Scope.DOMAIN)
    assert str(found.outcome.reply).startswith(
        "451 4.7.5 the MTA-STS policy 7 of example.com does not include"
    )


@pytest.mark.parametrize("mode", [StsMode.TESTING, StsMode.NONE])
def test_a_policy_that_does_not_enforce_leaves_the_route_as_it_is(mode: StsMode) -> None:
    mismatches = Mismatches()
    route = judged(policy_of("mx1.example.com", mode=mode), mismatches=mismatches)
    assert isinstance(route, Route)
    assert (len(route.hosts), route.tls, route.terms) == (3, None, "")
    assert mismatches.hosts == (["mx2.example.com", "evil.example.net"] if mode is StsMode.TESTING else [])


@pytest.mark.parametrize(
    ("zone", "secure", "demand", "terms"),
    [
        (ZoneSettings(tls=TlsMode.NONE), False, STS, "mta-sts"),
        (ZoneSettings(tls=TlsMode.REQUIRED), False, STS, "mta-sts"),
        (ZoneSettings(tls=TlsMode.VERIFY), False, None, ""),
        (ZoneSettings(), True, TlsDemand(TlsMode.VERIFY, dane=True, because="mta-sts"), "mta-sts dane"),
        (ZoneSettings(dane=False), True, STS, "mta-sts"),
        (ZoneSettings(tls=TlsMode.DANE), True, TlsDemand(TlsMode.DANE, dane=True), "dane"),
        (ZoneSettings(tls=TlsMode.DANE), False, None, ""),
    ],
)
def test_strongest_demand(zone: ZoneSettings, *, secure: bool, demand: TlsDemand | None, terms: str) -> None:
    route = judged(policy_of(), zone=zone, secure=secure)
    assert isinstance(route, Route)
    assert (route.tls, route.terms, len(route.hosts)) == (demand, terms, 2)


def test_an_entry_with_limits_only_leaves_the_policy_its_say() -> None:
    route = judged(policy_of(), entry=entry(max_connections=1))
    assert isinstance(route, Route)
    assert (route.tls, route.terms) == (STS, "destination[0] mta-sts")
    assert route.limits is not None
    assert route.limits.max_connections == 1


def test_an_entry_with_tls_takes_no_demand_from_dane() -> None:
    route = judged(None, entry=entry(tls=TlsMode.REQUIRED), secure=True)
    assert isinstance(route, Route)
    assert route.tls == TlsDemand(TlsMode.REQUIRED, because="destination")


def test_an_entry_that_demands_dane_tells_secure_domains_from_others_at_the_same_hosts() -> None:
    """In one line the route of either would have been used for both."""
    dane = entry(tls=TlsMode.DANE)
    secure, forged = (judged(None, entry=dane, secure=secure) for secure in (True, False))
    assert isinstance(secure, Route)
    assert isinstance(forged, Route)
    assert (secure.terms, forged.terms) == ("destination[0] dane", "destination[0]")
    assert secure.site == forged.site
    assert secure.destination != forged.destination
