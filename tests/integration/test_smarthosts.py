"""A relay whose smarthost wants a log-in: nothing bounces, the operator sees why, a correction resumes."""

from dataclasses import replace
from pathlib import Path

from tests.support.relay import LOOPBACK, relay_with, settings
from tests.support.smarthost import SMARTHOST_PASSWORD, Smarthost
from zonerelay.config.settings import CredentialSettings, RetrySettings, Settings, TlsMode, ZoneSettings
from zonerelay.operations.answers import ChangeResult
from zonerelay.operations.requests import Retry

MESSAGE = b"Subject: hello\r\n\r\nhello\r\n"


def configured(directory: Path, next_hop: str) -> Settings:
    password = directory / "password"
    password.write_text("wrong\n")
    zone = ZoneSettings(next_hop=next_hop, tls=TlsMode.VERIFY, credentials=("main",))
    credential = CredentialSettings(name="main", user="relay", password=str(password))
    retry = RetrySettings(jitter=0.0, suspend_min=600.0, suspend_max=600.0)
    return settings(directory, zone=zone, retry=retry, credential=(credential,))


async def test_a_wrong_password_is_a_problem_and_no_bounce(tmp_path: Path, smarthost: Smarthost) -> None:
    host = f"{LOOPBACK}:{smarthost.port}"
    async with relay_with(configured(tmp_path, host)) as running:
        for _ in range(3):
            await running.send("app@example.org", ["b@example.com"], MESSAGE)
        await running.until_logged("suspended")
        found = await running.status()
        reply = "535 5.7.8 no such user or password"
        assert f"zone default cannot log in at {host} as main: {reply}" in found.problems
        assert found.destinations[0].suspended_until is not None
        assert smarthost.logins == [("PLAIN", "relay", 535)]
        assert running.queued() == 3
        assert not running.log.named("bounced")
        exposed = running.metrics()
        assert 'zonerelay_smarthost_login{credential="main",zone="default"} 0.0' in exposed
        assert 'zonerelay_smarthost_logins_total{result="refused",zone="default"} 1.0' in exposed


async def test_a_reload_ends_the_suspension_and_a_retry_sends(tmp_path: Path, smarthost: Smarthost) -> None:
    chosen = configured(tmp_path, f"{LOOPBACK}:{smarthost.port}")
    async with relay_with(chosen) as running:
        await running.send("app@example.org", ["b@example.com"], MESSAGE)
        await running.until_logged("deferred")
        (tmp_path / "password").write_text(SMARTHOST_PASSWORD)
        await running.worker.reload(chosen)
        await running.send("app@example.org", ["b@example.com"], MESSAGE)
        await running.until_logged("delivered")
        assert running.log.named("login-restored")
        assert not [each for each in (await running.status()).problems if "log in" in each]
        await running.ask(Retry(everything=True), ChangeResult)
        await running.until_empty()
        assert smarthost.submitters == ["relay", "relay"]


async def test_retry_has_a_refused_login_tried_again_at_once(tmp_path: Path, smarthost: Smarthost) -> None:
    async with relay_with(configured(tmp_path, f"{LOOPBACK}:{smarthost.port}")) as running:
        await running.send("app@example.org", ["b@example.com"], MESSAGE)
        await running.until_logged("deferred")
        smarthost.users = {"relay": "wrong"}  # corrected at the other end: nothing of ours has changed
        await running.ask(Retry(everything=True), ChangeResult)
        await running.until_empty()
        assert smarthost.submitters == ["relay"]


async def test_mail_without_its_credential_goes_by_settings(tmp_path: Path, smarthost: Smarthost) -> None:
    chosen = configured(tmp_path, f"{LOOPBACK}:{smarthost.port}")
    (tmp_path / "password").write_text(SMARTHOST_PASSWORD)
    async with relay_with(chosen) as running:
        await running.send("app@example.org", ["b@example.com"], MESSAGE)
        await running.until_empty()
        other = replace(chosen.credential[0], name="other")
        zone = replace(chosen.zone[0], credentials=("other",))
        await running.worker.reload(replace(chosen, credential=(other,), zone=(zone,)))
        await running.send("app@example.org", ["b@example.com"], MESSAGE)
        await running.until_empty()
        assert [code for _, _, code in smarthost.logins] == [235, 235]
        exposed = running.metrics()
        assert 'credential="other"' in exposed
        assert 'credential="main"' not in exposed


async def test_explain_says_which_credential_a_sender_has(tmp_path: Path, smarthost: Smarthost) -> None:
    chosen = configured(tmp_path, f"{LOOPBACK}:{smarthost.port}")
    first = replace(chosen.credential[0], name="first", sender=("example.net",))
    for credentials, expected in (
        (("first", "main"), {"a@example.net": "first", "a@example.org": "main"}),
        (("first",), {"a@example.org": "none: no credential of the zone applies to this sender"}),
    ):
        zone = replace(chosen.zone[0], credentials=credentials)
        with_both = replace(chosen, credential=(first, *chosen.credential), zone=(zone,))
        async with relay_with(with_both) as running:
            for sender, credential in expected.items():
                found = await running.explain(sender=sender)
                assert found.credential == credential
            if len(credentials) == 2:
                await running.send("a@example.org", ["b@example.com"], MESSAGE)
                await running.until_logged("login-refused")
                found = await running.explain()
                assert found.credential.startswith("main, which cannot log in: 535 5.7.8")
