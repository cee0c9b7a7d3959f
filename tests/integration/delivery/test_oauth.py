"""XOAUTH2 with tokens from a token server: fetched, kept, renewed, replaced when refused, told to nobody."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from tests.integration.delivery.conftest import SMARTHOST_NAME as NAME
from tests.integration.delivery.conftest import Site, to
from tests.support.mail import ZONE
from tests.support.oauth import TokenServer
from tests.support.ports import free_ports
from tests.support.smarthost import LoginBed
from zonerelay.config.settings import CredentialSettings, OauthGrant, TlsMode, ZoneSettings
from zonerelay.delivery.auth.accounts import FIRST_PAUSE
from zonerelay.delivery.auth.oauth import LONGEST_PAUSE
from zonerelay.model.outcome import Scope, Verdict

D, F = Verdict.DELIVERED, Verdict.DEFERRED
USER = "mailer@example.org"
ZONE_IN = replace(
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
        self, zone: ZoneSettings = ZONE_IN, environment: dict[str, str] | None = None, **changes: object
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


async def test_a_refresh_token_gets_an_access_token_that_serves_until_shortly_before_its_end(
    cloud: Cloud,
) -> None:
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
    bed = cloud.bed(grant=OauthGrant.CLIENT_CREDENTIALS, refresh_token="")
    assert (await bed.send(to(cloud.smarthost))).verdict is D
    assert cloud.server.forms[0]["grant_type"] == "client_credentials"
    assert "refresh_token" not in cloud.server.forms[0]


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


async def test_a_new_refresh_token_is_written_to_its_file_before_the_access_token_is_used(
    cloud: Cloud,
) -> None:
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
async def test_garbage_and_trouble_of_the_token_server_defer_and_back_off(
    cloud: Cloud, answer: web.Response
) -> None:
    cloud.server.answer = answer
    bed = cloud.bed()
    for _ in range(5):
        outcome = await bed.send(to(cloud.smarthost))
        assert (outcome.verdict, outcome.counts) == (F, False)
    assert len(cloud.server.forms) == 1
    assert bed.events() == ["login-broken"]
    cloud.server.answer = None
    bed.clock.advance(LONGEST_PAUSE)
    assert (await bed.send(to(cloud.smarthost))).verdict is D
    assert bed.events() == ["login-broken", "login-restored"]


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


async def test_a_server_that_does_not_say_how_long_a_token_lasts_is_asked_every_few_minutes(
    cloud: Cloud,
) -> None:
    cloud.server.expires_in = None
    bed = cloud.bed()
    await bed.send(to(cloud.smarthost))
    bed.clock.advance(300)
    await bed.send(to(cloud.smarthost))
    assert cloud.server.given == 1
    bed.clock.advance(300)
    await bed.send(to(cloud.smarthost))
    assert cloud.server.given == 2


async def test_a_closed_relay_leaves_no_request_behind(cloud: Cloud) -> None:
    cloud.server.delay = 5.0
    bed = cloud.bed()
    sending = asyncio.create_task(bed.send(to(cloud.smarthost)))
    await asyncio.sleep(0.05)
    await asyncio.wait_for(bed.logins.close(), 1.0)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
