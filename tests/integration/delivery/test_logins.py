"""Logging in at smarthosts: with TLS only, each sender with its credential, and what a refusal means."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from tests.integration.delivery.conftest import SMARTHOST_NAME as NAME
from tests.integration.delivery.conftest import Site, to
from tests.support.mail import ZONE
from tests.support.smarthost import LoginBed, Smarthost
from zonerelay.config.settings import CredentialSettings, SaslMechanismName, TlsMode, ZoneSettings
from zonerelay.delivery.auth import accounts
from zonerelay.delivery.auth.accounts import FIRST_PAUSE
from zonerelay.model.outcome import Scope, Verdict
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


@pytest.mark.parametrize(
    ("offers", "expected"),
    [
        (("auth plain login",), "PLAIN"),
        (("Auth=login",), "LOGIN"),
        (("AUTH LOGIN", "AUTH=PLAIN"), "PLAIN"),
        (("AUTH PLAIN", "AUTH LOGIN GSSAPI"), "PLAIN"),
        (("AUTH GSSAPI", "auth login"), "LOGIN"),
    ],
)
async def test_mechanisms_are_the_union_of_the_lines_in_any_case(
    place: Place, offers: tuple[str, ...], expected: str
) -> None:
    host = await place.host(offers=offers, users={"relay": PASSWORD})
    assert (await place.bed().send(to(host))).verdict is D
    assert host.logins == [(expected, "relay", 235)]


@pytest.mark.parametrize("mechanism", ["PLAIN", "LOGIN"])
async def test_lines_without_a_code_hinder_neither_tls_nor_a_login(place: Place, mechanism: str) -> None:
    host = await place.host(mechanisms=mechanism, users={"relay": PASSWORD}, junk="\r\nNotice\r\n")
    bed = place.bed()
    for _ in range(2):
        assert (await bed.send(to(host))).verdict is D
    assert host.logins == [(mechanism, "relay", 235)]


async def test_odd_prompts_do_not_keep_anybody_from_logging_in(place: Place) -> None:
    for offers, prompts, plain_prompt in (
        ("LOGIN", ("", ""), None),
        ("LOGIN", ("Username:", "Password:"), None),
        ("LOGIN", ("UGFzc3dvcmQ6", "VXNlcm5hbWU6"), None),
        ("PLAIN", ("", ""), ""),
        ("PLAIN", ("", ""), "go on"),
    ):
        host = await place.host(
            mechanisms=offers, prompts=prompts, plain_prompt=plain_prompt, users={"relay": PASSWORD}
        )
        bed = place.bed()
        assert (await bed.send(to(host))).verdict is D
        assert host.logins == [(offers, "relay", 235)]
        assert bed.events() == []


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


async def test_nobody_logs_in_where_the_certificate_was_not_asked_for_unless_the_zone_says_required(
    place: Place,
) -> None:
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


async def test_a_host_that_hangs_at_auth_does_not_hold_up_others(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
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


async def test_an_operators_word_has_it_tried_at_once(place: Place) -> None:
    host = await place.host(users={"relay": "another one"})
    bed = place.bed()
    await bed.send(to(host))
    host.users = {"relay": PASSWORD}  # corrected at the smarthost
    assert (await bed.send(to(host))).verdict is F
    bed.logins.forgive("default")
    assert (await bed.send(to(host))).verdict is D


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
async def test_a_provider_that_takes_no_passwords_any_more_is_told_in_plain_words(
    place: Place, reply: str
) -> None:
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


async def test_each_sender_has_its_credential_and_connections_are_not_mixed(
    place: Place, tmp_path: Path
) -> None:
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


async def test_of_two_credentials_a_refused_one_is_the_trouble_of_its_own_mail_only(
    place: Place, tmp_path: Path
) -> None:
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


def words(lines: Sequence[str]) -> list[str]:
    return [line.split()[0] for line in lines if line]


async def test_the_order_of_events_is_tls_login_mail(place: Place) -> None:
    host = await place.host(users={"relay": PASSWORD})
    await place.bed().send(to(host))
    assert words(host.commands)[:5] == ["EHLO", "STARTTLS", "EHLO", "AUTH", "MAIL"]
