"""Logging in at smarthosts: with TLS only, each sender with its credential, and what a refusal means."""

import asyncio
import base64
import json
import stat
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from aiohttp import web
from msgspec import structs

from tests.integration.delivery.conftest import SMARTHOST_NAME as NAME
from tests.integration.delivery.conftest import Site, to
from tests.support.mail import ZONE
from tests.support.oauth import TokenServer
from tests.support.ports import free_ports
from tests.support.smarthost import LoginBed, Smarthost
from tests.support.waiting import until
from zonerelay.config.credentials.secrets import SecretError, read_secret
from zonerelay.config.settings import CredentialSettings, OauthGrant, SaslMechanismName, TlsMode, ZoneSettings
from zonerelay.delivery.auth import accounts
from zonerelay.delivery.auth.accounts import FIRST_PAUSE, SHORT_PAUSES, RefreshTokenFiles
from zonerelay.model.reply import Scope, Verdict
from zonerelay.routing.destinations.route import TlsDemand

D, F = Verdict.DELIVERED, Verdict.DEFERRED
PASSWORD = "correct horse battery"
ZONE_IN = replace(ZONE, tls=TlsMode.VERIFY, next_hop=f"[{NAME}]", credentials=("main",))


class Place(Site):
    """Beds have one credential unless told otherwise, whose password is in a file."""

    def bed(self, *credentials: CredentialSettings, zone: ZoneSettings = ZONE_IN) -> LoginBed:
        if not self.password.exists():
            self.password.write_text(f"{PASSWORD}\n")
        main = CredentialSettings(name="main", user="relay", password=str(self.password))
        return self.login(*(credentials or (main,)), zone=zone)

    @property
    def password(self) -> Path:
        return self.directory / "password"


@pytest.fixture
async def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    place = Place(tmp_path, monkeypatch)
    yield place
    await place.close()


def credential(tmp_path: Path, name: str, **changes: object) -> CredentialSettings:
    file = tmp_path / f"{name}.password"
    file.write_text(f"{PASSWORD} {name}\n")
    return replace(CredentialSettings(name=name, user=name, password=str(file)), **changes)  # type: ignore[arg-type]  # any option


@pytest.mark.parametrize("mechanism", ["PLAIN", "LOGIN"])
async def test_a_connection_is_logged_in_before_mail_is_sent_on_it(place: Place, mechanism: str) -> None:
    host = await place.host(mechanisms=mechanism, users={"relay": PASSWORD})
    bed = place.bed()
    for _ in range(3):
        assert (await bed.send(to(host))).verdict is D
    assert host.logins == [(mechanism, "relay", 235)]
    assert host.submitters == ["relay"] * 3
    assert host.connections == 1
    assert bed.standing() == {("default", "main"): 1.0}
    assert bed.events() == []


@pytest.mark.parametrize("mechanism", ["PLAIN", "LOGIN"])
async def test_lines_without_a_code_hinder_neither_tls_nor_a_login(place: Place, mechanism: str) -> None:
    host = await place.host(mechanisms=mechanism, users={"relay": PASSWORD}, junk="\r\nNotice\r\n")
    bed = place.bed()
    for _ in range(2):
        assert (await bed.send(to(host))).verdict is D
    assert host.logins == [(mechanism, "relay", 235)]


async def test_a_mechanism_may_be_prescribed(place: Place, tmp_path: Path) -> None:
    main = credential(tmp_path, "main", mechanism=SaslMechanismName.LOGIN)
    host = await place.host(users={"main": f"{PASSWORD} main"})
    assert (await place.bed(main).send(to(host))).verdict is D
    assert host.logins == [("LOGIN", "main", 235)]


async def test_nobody_logs_in_in_clear_text(place: Place) -> None:
    # Without a certificate, so without STARTTLS: AUTH is offered all the same.
    host = await place.start(Smarthost(users={"relay": PASSWORD}))
    for mode in (TlsMode.NONE, TlsMode.OPPORTUNISTIC):
        route = structs.replace(to(host), tls=TlsDemand(mode, because="destination"))
        outcome = await place.bed().send(route)
        assert (outcome.verdict, outcome.scope, outcome.reply.status) == (F, Scope.HOST, "4.7.4")
        assert "does not use TLS" in outcome.reply.text
    assert not [line for line in host.commands if line.startswith(("AUTH", "MAIL"))]


async def test_nobody_logs_in_without_a_certificate_unless_the_zone_says_required(place: Place) -> None:
    host = await place.host(users={"relay": PASSWORD})
    lowered = structs.replace(to(host), tls=TlsDemand(TlsMode.OPPORTUNISTIC, because="destination"))
    outcome = await place.bed().send(lowered)
    assert (outcome.verdict, outcome.reply.status) == (F, "4.7.5")
    assert host.logins == []
    bed = place.bed(zone=replace(ZONE_IN, tls=TlsMode.REQUIRED))
    assert (await bed.send(to(host))).verdict is D
    assert host.logins == [("PLAIN", "relay", 235)]


async def test_a_wrong_password_is_tried_once_and_bounces_nothing(place: Place) -> None:
    host = await place.host(users={"relay": "another one"})
    other = await place.host(users={"relay": "another one"})
    bed = place.bed()
    for _ in range(4):
        outcome = await bed.send(to(host, other))
        assert (outcome.verdict, outcome.scope, outcome.counts) == (F, Scope.HOST, False)
        assert outcome.reply.status == "4.7.0"
        assert "535 5.7.8 no such user or password" in outcome.reply.text
    assert host.logins == [("PLAIN", "relay", 535)]
    assert other.logins == []
    assert host.connections == 1
    [(event, fields)] = bed.log.events
    assert event == "login-refused"
    assert fields["zone"] == "default"
    assert fields["credential"] == "main"
    assert fields["reply"] == "535 5.7.8 no such user or password"
    assert bed.standing() == {("default", "main"): 0.0}


async def test_batches_at_the_same_time_try_a_wrong_password_once(place: Place) -> None:
    host = await place.host(users={"relay": "another one"})
    bed = place.bed()
    outcomes = await asyncio.gather(*(bed.send(to(host)) for _ in range(8)))
    assert {outcome.verdict for outcome in outcomes} == {F}
    assert host.logins == [("PLAIN", "relay", 535)]


async def test_a_password_that_was_right_and_is_wrong_now_is_tried_once(place: Place) -> None:
    host = await place.host(users={"relay": PASSWORD})
    bed = place.bed()
    assert (await bed.send(to(host))).verdict is D
    host.users = {"relay": "changed at the smarthost"}
    bed.courier.pool.close_idle()
    outcomes = await asyncio.gather(*(bed.send(to(host)) for _ in range(8)))
    assert {outcome.verdict for outcome in outcomes} == {F}
    assert [code for _, _, code in host.logins] == [235, 535]
    assert bed.events() == ["login-refused"]


async def test_a_password_that_is_refused_while_another_login_reads_it_is_tried_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await place.host(users={"relay": "another one"})
    bed, reads = place.bed(), count(1)

    def read(reference: str, environment: Mapping[str, str]) -> str:
        if next(reads) == 4:  # the second reading of the second login: the first one may begin
            waits = time.monotonic() + 10
            while not bed.events() and time.monotonic() < waits:
                time.sleep(0.005)
        return read_secret(reference, environment)

    monkeypatch.setattr(accounts, "read_secret", read)
    outcomes = await asyncio.gather(*(bed.send(to(host)) for _ in range(2)))
    assert {outcome.verdict for outcome in outcomes} == {F}
    assert next(reads) > 4
    assert host.logins == [("PLAIN", "relay", 535)]


async def test_a_host_that_hangs_at_auth_delays_none(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "PATIENCE", 0.05)
    host = await place.host(users={"relay": PASSWORD})
    hanging = await place.host(users={"relay": PASSWORD}, hangs_at_auth=True)
    bed = place.bed()
    assert (await bed.send(to(host))).verdict is D
    bed.courier.pool.close_idle()
    held = asyncio.create_task(bed.send(to(hanging)))
    while not hanging.logins:
        await asyncio.sleep(0.01)
    outcomes = await asyncio.gather(*(bed.send(to(host)) for _ in range(4)))
    assert {outcome.verdict for outcome in outcomes} == {D}
    held.cancel()
    await asyncio.wait({held})


async def test_after_the_pause_it_is_tried_once_more_and_a_corrected_password_at_once(place: Place) -> None:
    host = await place.host(users={"relay": "the new one"})
    bed = place.bed()
    await bed.send(to(host))
    bed.clock.advance(FIRST_PAUSE)
    await bed.send(to(host))
    await bed.send(to(host))
    assert len(host.logins) == 2
    place.password.write_text("the new one\n")
    assert (await bed.send(to(host))).verdict is D
    assert host.logins[2:] == [("PLAIN", "relay", 235)]
    assert bed.events() == ["login-refused", "login-refused", "login-restored"]
    assert bed.standing() == {("default", "main"): 1.0}


@pytest.mark.parametrize("reply", ["534 5.7.9 too weak", "538 5.7.11 encryption", "500 5.5.1 what", "535"])
async def test_whatever_refuses_a_login_is_no_reason_to_bounce(place: Place, reply: str) -> None:
    host = await place.host(auth_reply=reply)
    bed = place.bed()
    for _ in range(2):
        outcome = await bed.send(to(host))
        assert (outcome.verdict, outcome.scope) == (F, Scope.HOST)
    assert len(host.logins) == 1
    assert bed.events() == ["login-refused"]


MICROSOFT = "550 5.7.30 Basic authentication is not supported for Client Submission."


@pytest.mark.parametrize(
    "reply", [MICROSOFT, "535 5.7.139 Authentication unsuccessful, basic authentication is disabled."]
)
async def test_a_provider_that_takes_no_passwords_now_is_told_in_words(place: Place, reply: str) -> None:
    host = await place.host(auth_reply=reply)
    bed = place.bed()
    outcome = await bed.send(to(host))
    assert (outcome.verdict, outcome.scope, outcome.counts) == (F, Scope.HOST, False)
    assert reply in outcome.reply.text
    assert "use XOAUTH2 (token_url" in outcome.reply.text
    [problem] = bed.logins.problems()
    assert "password logins are disabled" in problem
    assert "use XOAUTH2 (token_url" in problem


async def test_a_password_at_microsoft_is_a_problem_in_status_before_it_is_refused(place: Place) -> None:
    bed = place.bed()
    bed.logins.configure(
        [CredentialSettings(name="main", user="relay", password="/etc/main.password")],
        {},
        [ZoneSettings(next_hop="[smtp.office365.com]:587", credentials=("main",), tls=TlsMode.VERIFY)],
    )
    [problem] = bed.logins.problems()
    assert problem.startswith("zone default logs in at smtp.office365.com with a password (main): Microsoft")


@pytest.mark.parametrize("reply", ["454 4.7.0 try later", "421 4.3.0 closing", "432 4.7.12 first by hand"])
async def test_a_temporary_refusal_is_the_hosts_and_the_next_one_is_tried(place: Place, reply: str) -> None:
    busy = await place.host(auth_reply=reply)
    second = await place.host(users={"relay": PASSWORD})
    bed = place.bed()
    assert (await bed.send(to(busy, second))).verdict is D
    assert second.submitters == ["relay"]
    assert bed.events() == []


async def test_a_smarthost_without_a_mechanism_in_common_is_told(place: Place) -> None:
    for mechanisms, offered in (("GSSAPI NTLM", "GSSAPI, NTLM"), ("", "no AUTH at all")):
        host = await place.host(mechanisms=mechanisms)
        bed = place.bed()
        outcome = await bed.send(to(host))
        assert (outcome.verdict, outcome.scope) == (F, Scope.HOST)
        assert offered in outcome.reply.text
        assert bed.events() == ["login-refused"]


async def test_each_sender_has_its_credential_and_its_connections(place: Place, tmp_path: Path) -> None:
    one = credential(tmp_path, "one", sender=("example.org", "bounce-*@example.com"))
    two = credential(tmp_path, "two", sender=("*.example.net", "<>"))
    host = await place.host(users={name: f"{PASSWORD} {name}" for name in ("one", "two")})
    bed = place.bed(one, two, zone=replace(ZONE_IN, credentials=("one", "two")))
    for sender in ("a@example.org", "b@mail.example.net", "bounce-1@example.com", "", "c@example.org"):
        assert (await bed.send(to(host), sender)).verdict is D
    assert host.submitters == ["one", "two", "one", "two", "one"]
    assert host.connections == 2


async def test_a_sender_without_a_credential_waits(place: Place, tmp_path: Path) -> None:
    only = credential(tmp_path, "main", sender=("example.org",))
    host = await place.host(users={"main": f"{PASSWORD} main"})
    outcome = await place.bed(only).send(to(host), "b@example.net")
    assert (outcome.verdict, outcome.scope, outcome.counts) == (F, Scope.LOCAL, False)
    assert outcome.reply.text == "no credential of zone default applies to this sender"
    assert host.connections == 0


async def test_of_two_credentials_a_refused_one_stops_its_own_mail_only(place: Place, tmp_path: Path) -> None:
    one = credential(tmp_path, "one", sender=("example.org",))
    two = credential(tmp_path, "two")
    host = await place.host(users={"two": f"{PASSWORD} two"})
    bed = place.bed(one, two, zone=replace(ZONE_IN, credentials=("one", "two")))
    refused = await bed.send(to(host), "a@example.org")
    assert (refused.verdict, refused.scope, refused.counts) == (F, Scope.MESSAGE, False)
    assert (await bed.send(to(host), "b@example.net")).verdict is D
    assert bed.standing() == {("default", "one"): 0.0, ("default", "two"): 1.0}


async def test_a_password_that_cannot_be_read_defers_and_is_told_once(place: Place) -> None:
    host = await place.host(users={"relay": PASSWORD})
    bed = place.bed()
    place.password.unlink()
    for _ in range(3):
        outcome = await bed.send(to(host))
        assert (outcome.verdict, outcome.counts) == (F, False)
        assert "cannot be read" in outcome.reply.text
    assert host.connections == 0
    assert bed.events() == ["login-broken"]
    assert bed.standing() == {("default", "main"): 0.0}
    place.password.write_text(PASSWORD)
    assert (await bed.send(to(host))).verdict is D
    assert bed.events() == ["login-broken", "login-restored"]


async def test_what_a_smarthost_repeats_of_the_password_is_told_to_nobody(place: Place) -> None:
    line = base64.b64encode(f"\0relay\0{PASSWORD}".encode()).decode()
    host = await place.host(auth_reply=f"535 5.7.8 wrong: {PASSWORD} ({line}; {line[:20]})")
    bed = place.bed()
    outcome = await bed.send(to(host))
    told = f"{outcome} {bed.log.events} {list(bed.logins.problems())}"
    assert "[secret]" in told
    for secret in (PASSWORD, line, line[:20]):
        assert secret not in told


async def test_a_smarthost_that_hangs_up_is_not_a_refusal(place: Place) -> None:
    dead = await place.host(closed=True)
    second = await place.host(users={"relay": PASSWORD})
    bed = place.bed()
    assert (await bed.send(to(dead, second))).verdict is D
    assert bed.events() == []


# ---- XOAUTH2 with tokens from a token server -----------------------------------------------------


USER = "mailer@example.org"
CLOUD_ZONE = replace(
    ZONE,
    tls=TlsMode.VERIFY,
    next_hop=f"[{NAME}]",
    credentials=("cloud",),
    max_messages_per_connection=1,  # each message logs in
)


class Cloud(Site):
    """A token server, a smarthost that takes its first ten tokens, and the operator's files."""

    async def open(self) -> None:
        self.server = await self.start(TokenServer())
        tokens = {f"access-token-{n}" for n in range(1, 11)}
        self.smarthost = await self.host(mechanisms="XOAUTH2 PLAIN", tokens=tokens)
        self.refresh_token = self.directory / "cloud.refresh"
        self.client_secret = self.directory / "cloud.secret"
        self.refresh_token.write_text("refresh-token-0\n")
        self.client_secret.write_text("client-secret\n")

    def bed(
        self, zone: ZoneSettings = CLOUD_ZONE, environment: dict[str, str] | None = None, **changes: object
    ) -> LoginBed:
        settings = CredentialSettings(
            name="cloud",
            user=USER,
            token_url=self.server.url,
            client_id="an-app",
            client_secret=str(self.client_secret),
            refresh_token=str(self.refresh_token),
            scope="https://mail.example/.default",
        )
        settings = replace(settings, **changes)  # type: ignore[arg-type]  # any option
        return self.login(settings, zone=zone, environment=environment)


@pytest.fixture
async def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cloud]:
    cloud = Cloud(tmp_path, monkeypatch)
    await cloud.open()
    yield cloud
    await cloud.close()


def told(bed: LoginBed, outcomes: object = "") -> str:
    return f"{bed.log.events} {list(bed.logins.problems())} {outcomes}"


async def test_a_refresh_token_gets_an_access_token_that_serves_almost_to_its_end(cloud: Cloud) -> None:
    bed = cloud.bed()
    for _ in range(3):
        assert (await bed.send(to(cloud.smarthost))).verdict is D
    assert cloud.smarthost.logins == [("XOAUTH2", USER, 235)] * 3
    assert cloud.server.forms == [
        {
            "grant_type": "refresh_token",
            "client_id": "an-app",
            "client_secret": "client-secret",
            "scope": "https://mail.example/.default",
            "refresh_token": "refresh-token-0",
        }
    ]
    bed.clock.advance(3600)
    assert (await bed.send(to(cloud.smarthost))).verdict is D
    assert cloud.server.given == 2


async def test_client_credentials_need_no_refresh_token(cloud: Cloud) -> None:
    cloud.server.rotates = True  # some servers send one nevertheless
    bed = cloud.bed(grant=OauthGrant.CLIENT_CREDENTIALS, refresh_token="")
    assert (await bed.send(to(cloud.smarthost))).verdict is D
    assert cloud.server.forms[0]["grant_type"] == "client_credentials"
    assert "refresh_token" not in cloud.server.forms[0]
    assert bed.events() == []


async def test_a_token_is_renewed_ahead_of_its_end_without_anybody_waiting(cloud: Cloud) -> None:
    bed = cloud.bed()
    await bed.send(to(cloud.smarthost))
    bed.clock.advance(3000)
    cloud.server.delay = 0.2
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert (await bed.send(to(cloud.smarthost))).verdict is D
    assert loop.time() - began < 0.2
    while cloud.server.given < 2:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.02)
    cloud.smarthost.tokens = {"access-token-2"}
    assert (await bed.send(to(cloud.smarthost))).verdict is D
    assert cloud.server.given == 2


async def test_many_that_need_a_token_ask_for_it_once(cloud: Cloud) -> None:
    cloud.server.delay = 0.05
    bed = cloud.bed()
    outcomes = await asyncio.gather(*(bed.send(to(cloud.smarthost)) for _ in range(8)))
    assert {outcome.verdict for outcome in outcomes} == {D}
    assert cloud.server.given == 1


async def test_a_kept_token_that_is_refused_is_replaced_once_on_a_new_connection(cloud: Cloud) -> None:
    bed = cloud.bed()
    await bed.send(to(cloud.smarthost))
    cloud.smarthost.tokens = {"access-token-2"}  # the first was revoked
    outcome = await bed.send(to(cloud.smarthost))
    assert outcome.verdict is D
    assert [code for _, _, code in cloud.smarthost.logins] == [235, 535, 235]
    assert cloud.server.given == 2
    assert bed.events() == []


async def test_many_with_a_kept_token_that_is_refused_show_it_once(cloud: Cloud) -> None:
    bed = cloud.bed()
    await bed.send(to(cloud.smarthost))
    cloud.smarthost.tokens = {"access-token-2"}
    bed.courier.pool.close_idle()
    outcomes = await asyncio.gather(*(bed.send(to(cloud.smarthost)) for _ in range(8)))
    assert {outcome.verdict for outcome in outcomes} == {D}
    assert [code for _, _, code in cloud.smarthost.logins].count(535) == 1
    assert cloud.server.given == 2


async def test_a_kept_token_whose_successor_is_refused_too_suspends(cloud: Cloud) -> None:
    bed = cloud.bed()
    await bed.send(to(cloud.smarthost))
    cloud.smarthost.tokens = set()
    for _ in range(2):
        assert (await bed.send(to(cloud.smarthost))).verdict is F
    assert [code for _, _, code in cloud.smarthost.logins] == [235, 535, 535]
    assert cloud.server.given == 2
    assert bed.events() == ["login-refused"]


async def test_a_fresh_token_that_is_refused_suspends_and_is_explained(cloud: Cloud) -> None:
    cloud.smarthost.tokens = set()
    bed = cloud.bed()
    for _ in range(3):
        outcome = await bed.send(to(cloud.smarthost))
        assert (outcome.verdict, outcome.scope, outcome.counts) == (F, Scope.HOST, False)
    assert (
        "the token was rejected: status 401, schemes bearer, scope https://mail.example/"
        in outcome.reply.text
    )
    assert [code for _, _, code in cloud.smarthost.logins] == [535]
    assert cloud.server.given == 1
    assert bed.events() == ["login-refused"]
    assert "access-token-1" not in told(bed, outcome)
    bed.clock.advance(FIRST_PAUSE)
    await bed.send(to(cloud.smarthost))  # with another one
    assert [code for _, _, code in cloud.smarthost.logins] == [535, 535]
    assert cloud.server.given == 2


async def test_a_new_refresh_token_is_in_its_file_before_the_access_token_is_used(cloud: Cloud) -> None:
    cloud.server.rotates = True
    cloud.refresh_token.chmod(0o640)
    written: list[str] = []
    taken = cloud.smarthost.tokens
    cloud.smarthost.tokens = _Watched(taken, lambda: written.append(cloud.refresh_token.read_text()))
    bed = cloud.bed()
    assert (await bed.send(to(cloud.smarthost))).verdict is D
    assert written == ["refresh-token-1\n"]
    assert stat.S_IMODE(cloud.refresh_token.stat().st_mode) == 0o600
    bed.clock.advance(3600)
    assert (await bed.send(to(cloud.smarthost))).verdict is D
    assert [form["refresh_token"] for form in cloud.server.forms] == ["refresh-token-0", "refresh-token-1"]
    assert cloud.refresh_token.read_text() == "refresh-token-2\n"
    assert not list(cloud.directory.glob(".*"))  # nothing half written is left


class _Watched(set[str]):
    def __init__(self, tokens: set[str], asked: Callable[[], None]) -> None:
        super().__init__(tokens)
        self._asked = asked

    def __contains__(self, token: object) -> bool:
        self._asked()
        return super().__contains__(token)


async def test_a_new_refresh_token_of_an_environment_variable_is_kept_beside_the_spool(cloud: Cloud) -> None:
    cloud.server.rotates = True
    environment = {"REFRESH": "refresh-token-0"}
    bed = cloud.bed(environment=environment, refresh_token="env:REFRESH")
    assert (await bed.send(to(cloud.smarthost))).verdict is D
    kept = cloud.directory / "refresh-tokens" / "cloud.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    # After a restart it is still the one that counts …
    again = cloud.bed(environment=environment, refresh_token="env:REFRESH")
    assert (await again.send(to(cloud.smarthost))).verdict is D
    assert cloud.server.forms[-1]["refresh_token"] == "refresh-token-1"
    # … until the operator gives another one.
    cloud.server.refresh_token = "from-the-browser"
    third = cloud.bed(environment={"REFRESH": "from-the-browser"}, refresh_token="env:REFRESH")
    assert (await third.send(to(cloud.smarthost))).verdict is D
    assert cloud.server.forms[-1]["refresh_token"] == "from-the-browser"


async def test_a_new_refresh_token_that_cannot_be_written_down_serves_and_is_told(cloud: Cloud) -> None:
    cloud.server.rotates = True
    (cloud.directory / "refresh-tokens").write_text("a file where a directory should be")
    bed = cloud.bed(environment={"REFRESH": "refresh-token-0"}, refresh_token="env:REFRESH")
    assert (await bed.send(to(cloud.smarthost))).verdict is D
    assert bed.events() == ["token-trouble"]
    bed.clock.advance(3600)
    assert (await bed.send(to(cloud.smarthost))).verdict is D
    assert cloud.server.forms[-1]["refresh_token"] == "refresh-token-1"
    assert "refresh-token" not in told(bed).replace("refresh-tokens", "")


@pytest.mark.parametrize(
    ("status", "document"),
    [
        (400, {"error": "invalid_grant", "error_description": "AADSTS70008: expired refresh-token-0"}),
        (401, {"error": "invalid_client"}),
        (401, {}),
        (400, {"error": "unauthorized_client"}),
        (403, {"error": "access_denied"}),
    ],
)
async def test_what_the_token_server_refuses_is_an_alarm_and_not_asked_again_soon(
    cloud: Cloud, status: int, document: dict[str, str]
) -> None:
    cloud.server.answer = web.Response(
        status=status, text=json.dumps(document), content_type="application/json"
    )
    bed = cloud.bed()
    for _ in range(3):
        outcome = await bed.send(to(cloud.smarthost))
        assert (outcome.verdict, outcome.scope, outcome.counts) == (F, Scope.HOST, False)
        bed.clock.advance(60)
    assert len(cloud.server.forms) == 1
    assert cloud.smarthost.connections == 0
    assert bed.events() == ["login-broken"]
    assert bed.standing() == {("default", "cloud"): 0.0}
    assert "refresh-token-0" not in told(bed, outcome)
    assert "client-secret" not in told(bed, outcome)


async def test_no_part_of_a_long_refresh_token_is_told(cloud: Cloud) -> None:
    token = "0.AX-" + "abcdefgh" * 200
    cloud.refresh_token.write_text(token)
    document = {"error": "invalid_grant", "error_description": f"the token {token} has expired"}
    cloud.server.answer = web.Response(status=400, text=json.dumps(document), content_type="application/json")
    bed = cloud.bed()
    outcome = await bed.send(to(cloud.smarthost))
    assert "abcdefgh" not in told(bed, outcome)
    assert "the token [secret] has expired" in told(bed, outcome)


async def test_after_a_refused_grant_another_refresh_token_is_tried_at_once(cloud: Cloud) -> None:
    cloud.server.refresh_token = "another"
    bed = cloud.bed()
    assert (await bed.send(to(cloud.smarthost))).verdict is F
    cloud.refresh_token.write_text("another\n")
    assert (await bed.send(to(cloud.smarthost))).verdict is D
    assert bed.events() == ["login-broken", "login-restored"]


async def test_many_that_share_a_refused_request_wait_for_the_first_pause(cloud: Cloud) -> None:
    cloud.server.answer = web.Response(status=401, text="{}")
    bed = cloud.bed()
    await asyncio.gather(*(bed.send(to(cloud.smarthost)) for _ in range(5)))
    assert len(cloud.server.forms) == 1
    cloud.server.answer = None
    bed.clock.advance(FIRST_PAUSE)
    assert (await bed.send(to(cloud.smarthost))).verdict is D


@pytest.mark.parametrize(
    "answer",
    [
        web.Response(status=500, text="oops"),
        web.Response(status=503, text='{"error": "temporarily_unavailable"}'),
        web.Response(status=400, text="<html>a proxy</html>"),
        web.Response(status=400, text='{"error": 7}'),
        web.Response(status=200, text="not json"),
        web.Response(status=200, text="[]"),
        web.Response(status=200, text='{"access_token": ""}'),
        web.Response(status=200, text='{"access_token": "a b\\u0001c"}'),
        web.Response(status=200, text='{"access_token": "abc", "token_type": "mac"}'),
        web.Response(status=200, text='{"access_token": "' + "t" * 9000 + '"}'),
        web.Response(status=200, text="[" * 60_000),
        web.Response(status=200, text=" " * 70_000),
        web.Response(status=302, text=""),
    ],
    ids=lambda answer: f"{answer.status} {(answer.text or '')[:30]}",
)
async def test_trouble_of_the_token_server_defers_and_backs_off(cloud: Cloud, answer: web.Response) -> None:
    cloud.server.answer = answer
    bed = cloud.bed()
    for _ in range(5):
        outcome = await bed.send(to(cloud.smarthost))
        assert (outcome.verdict, outcome.counts) == (F, False)
    assert len(cloud.server.forms) == 1
    assert bed.events() == ["login-broken"]
    cloud.server.answer = None
    bed.clock.advance(SHORT_PAUSES[0])
    assert (await bed.send(to(cloud.smarthost))).verdict is D
    assert bed.events() == ["login-broken", "login-restored"]


async def test_the_try_after_a_pause_goes_on_at_the_next_host(cloud: Cloud) -> None:
    """A host that could not be reached used up the try, for two minutes."""
    closed = await cloud.host(closed=True)
    cloud.server.answer = web.Response(status=500, text="oops")
    bed = cloud.bed()
    assert (await bed.send(to(closed, cloud.smarthost))).verdict is F
    cloud.server.answer = None
    bed.clock.advance(SHORT_PAUSES[0])
    assert (await bed.send(to(closed, cloud.smarthost))).verdict is D


async def test_a_token_server_that_is_not_there_defers(cloud: Cloud) -> None:
    (port,) = free_ports(1)
    bed = cloud.bed(token_url=f"http://127.0.0.1:{port}/token")
    outcome = await bed.send(to(cloud.smarthost))
    assert (outcome.verdict, outcome.counts) == (F, False)
    assert "127.0.0.1 is unreachable" in outcome.reply.text


async def test_a_batch_that_is_cancelled_leaves_the_token_to_the_others(cloud: Cloud) -> None:
    cloud.server.delay = 0.1
    bed = cloud.bed()
    first = asyncio.create_task(bed.send(to(cloud.smarthost)))
    second = asyncio.create_task(bed.send(to(cloud.smarthost)))
    await asyncio.sleep(0.05)
    first.cancel()
    assert (await second).verdict is D
    assert cloud.server.given == 1


async def test_a_server_that_does_not_say_how_long_tokens_last_is_asked_again(cloud: Cloud) -> None:
    cloud.server.expires_in = None
    bed = cloud.bed()
    await bed.send(to(cloud.smarthost))
    bed.clock.advance(300)
    await bed.send(to(cloud.smarthost))
    assert cloud.server.given == 1
    bed.clock.advance(300)
    await bed.send(to(cloud.smarthost))
    assert cloud.server.given == 2


async def test_a_reload_during_a_token_request_does_not_cancel_its_mail(cloud: Cloud) -> None:
    """The batch was cancelled with the request, and its mail waited until something else woke the zone."""
    cloud.server.delay = 0.2
    bed = cloud.bed()
    sending = asyncio.create_task(bed.send(to(cloud.smarthost)))
    await until(lambda: cloud.server.forms)
    bed.logins.configure([], {}, [])
    assert (await sending).verdict is D


@pytest.mark.parametrize("answer", [None, web.Response(status=401, text="{}")], ids=["granted", "refused"])
async def test_mail_from_before_a_reload_leaves_the_new_settings_alone(
    cloud: Cloud, answer: web.Response | None
) -> None:
    """Its token server was asked with the old settings from then on, and its failure paused the new ones."""
    cloud.server.delay, cloud.server.answer = 0.2, answer
    bed = cloud.bed()
    old = bed.logins.credential_for(CLOUD_ZONE, "")
    sending = asyncio.create_task(bed.send(to(cloud.smarthost)))
    await until(lambda: cloud.server.forms)
    bed.logins.configure([replace(old, client_id="another-app")], {}, [CLOUD_ZONE])
    await sending
    cloud.server.answer = None
    assert (await bed.send(to(cloud.smarthost))).verdict is D
    assert [form["client_id"] for form in cloud.server.forms] == ["an-app", "another-app"]
    assert bed.events() == []


async def test_a_refresh_token_that_an_operator_stores_during_a_request_stays(cloud: Cloud) -> None:
    """The server's next one, which is of the old grant, was written over it."""
    cloud.server.delay, cloud.server.rotates = 0.2, True
    bed = cloud.bed()
    sending = asyncio.create_task(bed.send(to(cloud.smarthost)))
    await until(lambda: cloud.server.forms)
    cloud.refresh_token.write_text("of another grant\n")
    assert (await sending).verdict is D
    assert cloud.refresh_token.read_text() == "of another grant\n"


async def test_a_closed_relay_leaves_no_request_behind(cloud: Cloud) -> None:
    cloud.server.delay = 5.0
    bed = cloud.bed()
    sending = asyncio.create_task(bed.send(to(cloud.smarthost)))
    await asyncio.sleep(0.05)
    await asyncio.wait_for(bed.logins.close(), 1.0)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)


def test_a_kept_refresh_token_that_is_no_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "cloud.json").write_bytes(b'{"replaces": "\xff"}')
    with pytest.raises(SecretError, match="the file is damaged"):
        RefreshTokenFiles(tmp_path).current("cloud", "token")
