"""Users held to their guard rails in a running relay: each refusal in its words, modes up to the receiver."""

import asyncio
import errno
import os
import smtplib
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.credentials import file_of, user
from tests.support.relay import LOOPBACK, Running, relay_with, settings
from tests.support.sink import Sink
from zonerelay.capture import store as capture_store
from zonerelay.config import settings as tables
from zonerelay.config import user_limits
from zonerelay.config.credentials.file import User
from zonerelay.config.settings import AuthSettings, ListenerAuth, RouteSettings, UnsafeListener, ZoneSettings
from zonerelay.config.user_limits import UserLimits
from zonerelay.inbound.limits import usage_file

LISTENER = tables.ListenerSettings(
    address=f"{LOOPBACK}:0", auth=ListenerAuth.OPTIONAL, unsafe=(UnsafeListener.CLEARTEXT_AUTH,)
)
MESSAGE = b"From: shop@example.org\r\nSubject: x\r\n\r\nhello\r\n"


class House:
    """A relay, its users and a receiver."""

    def __init__(self, running: Running, credentials: Path, sink: Sink) -> None:
        self.running = running
        self.credentials = credentials
        self.sink = sink

    def set(self, *assignments: str, name: str = "shop") -> None:
        self.change(name, lambda there, limits: (there, user_limits.changed(limits, list(assignments))))

    def change(self, name: str, change: Callable[[User, UserLimits], tuple[User, UserLimits]]) -> None:
        def known(there: User | None, limits: UserLimits) -> tuple[User, UserLimits]:
            assert there is not None
            return change(there, limits)

        user_limits.change_user(self.credentials, name, known)

    def only(self, *assignments: str) -> None:
        """These and no others."""
        user_limits.file_beside(self.credentials).unlink(missing_ok=True)
        self.set(*assignments)

    async def log_in(self, password: str = "correct horse", name: str = "shop") -> smtplib.SMTP:
        def begin() -> smtplib.SMTP:
            client = smtplib.SMTP(*self.running.address, timeout=20)
            try:
                client.login(name, password)
            except smtplib.SMTPException:
                client.close()
                raise
            return client

        return await asyncio.to_thread(begin)

    async def send(
        self, recipients: Sequence[str] = ("ann@example.com",), message: bytes = MESSAGE, size: bool = True
    ) -> str:
        """The last reply, of the step that was refused or of the whole message."""
        client = await self.log_in()

        def submit() -> str:
            with client:
                options = [f"size={len(message)}"] if size else []
                code, text = client.mail("shop@example.org", options)
                for each in recipients:
                    if code == 250:
                        code, text = client.rcpt(each)
                if code == 250:
                    code, text = client.data(message)
                return f"{code} {text.decode()}"

        return await asyncio.to_thread(submit)


@asynccontextmanager
async def house_in(
    directory: Path, sink: Sink, *more: ZoneSettings, trouble_expected: bool = False
) -> AsyncIterator[House]:
    credentials = directory / "credentials"
    if not credentials.exists():
        credentials.write_text(file_of(user("shop"), user("other")))
    zones = [ZoneSettings(name=name, next_hop=f"{LOOPBACK}:{sink.port}") for name in ("default", "bulk")]
    zones += more
    route = RouteSettings(recipient=("bulk.example",), zone="bulk")
    chosen = settings(
        directory, zone=zones, route=(route,), listener=LISTENER, auth=AuthSettings(credentials=credentials)
    )
    async with relay_with(chosen, trouble_expected=trouble_expected) as running:
        yield House(running, credentials, sink)


@pytest.fixture
async def house(tmp_path: Path, sink: Sink) -> AsyncIterator[House]:
    async with house_in(tmp_path, sink) as house:
        yield house


async def test_each_guard_rail_is_refused_in_its_words_without_a_reload(house: House) -> None:
    assert (await house.send()).startswith("250")
    house.only("recipients=*.example.net, bob@example.com")
    assert await house.send() == "550 5.7.1 This user may not send to this recipient"
    assert (await house.send(["bob@example.com", "x@a.example.net"])).startswith("250")
    house.only("zones=default")
    assert await house.send(["x@bulk.example"]) == "550 5.7.1 This user may not send through the zone bulk"
    house.only("max_message_size=1KB")
    too_big = "552 5.3.4 Message exceeds 1 KB, the limit of this user"
    large = MESSAGE + b"x" * 60 * 20 + b"\r\n"
    assert await house.send(message=large) == too_big
    assert await house.send(message=large, size=False) == too_big
    house.only("networks=192.0.2.0/24")
    with pytest.raises(smtplib.SMTPAuthenticationError, match=r"5\.7\.1 This user may not send from 127"):
        await house.log_in()
    house.only()
    client = await house.log_in()
    house.only("expires=2026-01-01")
    assert (await asyncio.to_thread(client.mail, "a@example.org")) == (
        550,
        b"5.7.13 This user expired on 2026-01-01",
    )
    house.only("disabled=true")
    with pytest.raises(smtplib.SMTPAuthenticationError, match=r"535, b'5\.7\.13 This user is disabled"):
        await house.log_in()
    with pytest.raises(smtplib.SMTPAuthenticationError, match=r"535, b'5\.7\.8"):
        await house.log_in("wrong password")
    house.only("disabled=")
    assert (await asyncio.to_thread(client.mail, "a@example.org"))[0] == 250
    await asyncio.to_thread(client.close)


async def test_guard_rails_that_cannot_be_read_open_nothing(house: House) -> None:
    client = await house.log_in()
    file = user_limits.file_beside(house.credentials)
    file.write_text('[user.shop]\nrecipient = ["example.com"]\n')
    assert (await asyncio.to_thread(client.mail, "a@example.org"))[0] == 451
    with pytest.raises(smtplib.SMTPAuthenticationError, match="454"):
        await house.log_in()
    (await house.log_in(name="other")).close()
    problem = "unknown key; did you mean recipients? (line 2)"
    assert any(problem in each for each in (await house.running.status()).problems)
    file.write_text("[user.shop\n")
    with pytest.raises(smtplib.SMTPAuthenticationError, match="454"):
        await house.log_in(name="other")
    file.unlink()
    (await house.log_in()).close()
    assert (await asyncio.to_thread(client.mail, "a@example.org"))[0] == 250
    client.close()


async def test_quotas_count_over_restarts_and_say_when_to_come_back(tmp_path: Path, sink: Sink) -> None:
    async with house_in(tmp_path, sink) as house:
        house.set("recipients_per_hour=5", "octets_per_day=1KB")
        assert (await house.send(["a@x.example", "b@x.example"])).startswith("250")
        full = await house.send(["a@x.example", "b@x.example", "c@x.example", "d@x.example"])
        assert full.startswith("452 4.7.1 Limit of 5 recipients per hour reached, try again in 6")
        assert (await house.send(["a@x.example", "b@x.example"])).startswith("250")
        (near,) = await house.running.until_logged("quota-near")
        assert (near["quota"], near["used"], near["most"]) == ("recipients_per_hour", 4, 5)
        large = await house.send(message=MESSAGE + b"x" * 2000, size=False)
        assert large == "552 5.3.4 Message exceeds 1 KB, this user's quota per day"
        (row,) = (await house.running.status()).quotas
        assert (row.user, row.quota, row.used, row.most) == ("shop", "recipients_per_hour", 4, 5)
        metrics = house.running.worker.metrics
        assert metrics.quota_refused._numbers["recipients_per_hour",] == 1
        assert b'zonerelay_user_quota_used_ratio{user="shop"} 0.8' in metrics.exposition()
    async with house_in(tmp_path, sink) as house:
        assert (await house.send()).startswith("250")
        assert (await house.send()).startswith("452 4.7.1 Limit of 5 recipients per hour")
        house.set("recipients_per_hour=")
        assert (await house.send()).startswith("250")


@pytest.mark.parametrize("how", ["damaged", "locked"])
async def test_files_beside_the_spool_are_problems_until_they_can_be_used(
    tmp_path: Path, sink: Sink, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    for module in (usage_file, capture_store):
        monkeypatch.setattr(module, "BUSY", 0.1)
    kept = ZoneSettings(name="kept", next_hop="capture:")
    async with house_in(tmp_path, sink, kept, trouble_expected=True) as house:

        async def problems() -> list[str]:
            return [
                each
                for each in (await house.running.status()).problems
                if "captured" in each or "usage" in each
            ]

        house.only("mode=listed", "recipients=example.net", "zones=default", "messages_per_hour=1000")
        assert (await house.send()).startswith("250")
        await house.running.until_empty()
        assert await problems() == []
        files = [tmp_path / "usage" / "usage.db", tmp_path / "captured" / "captured.db"]
        others = [sqlite3.connect(file, isolation_level=None) for file in files]
        if how == "locked":
            for other in others:
                other.execute("BEGIN IMMEDIATE")
        else:
            for each in [each for file in files for each in file.parent.iterdir()]:
                each.write_bytes(b"no database " * 10_000)
        assert (await house.send()).startswith("451")
        found = await problems()
        why = "it is damaged" if how == "damaged" else "another process has locked it"
        assert len([each for each in found if why in each]) == len(
            files if how == "damaged" else files[:1]
        ), found
        for other, file in zip(others, files, strict=True):
            other.close()
            if how == "damaged":
                for each in file.parent.iterdir():
                    each.unlink()
        assert (await house.send()).startswith("250")
        await house.running.until_empty()
        assert await problems() == []


async def test_a_file_that_the_configuration_names_is_a_problem_while_it_is_missing(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def missing() -> list[str]:
        return [each for each in (await house.running.status()).problems if "is missing" in each]

    assert await missing() == []
    away = house.credentials.rename(house.credentials.with_name("away"))
    assert [str(house.credentials) in each and "auth.credentials" in each for each in await missing()] == [
        True
    ]
    away.rename(house.credentials)
    assert await missing() == []
    stat = os.stat

    def refuse(path: object, **more: Any) -> os.stat_result:
        if str(path) == str(house.credentials):
            raise PermissionError(errno.EACCES, "its directory may not be searched")
        return stat(path, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", refuse)
    assert len(await missing()) == 1


async def test_mail_is_redirected_copied_and_captured(house: House) -> None:
    house.set("mode=redirect", "mailbox=qa@example.org")
    assert (await house.send(["ann@example.com", "bob@example.com"])).startswith("250")
    (redirected,) = await house.sink.wait_for(1)
    assert redirected.recipients == ("qa@example.org",)
    for name in (b"ann", b"bob"):
        assert b"\r\nX-Original-To: " + name + b"@example.com\r\n" in redirected.body
    house.set("mode=copy")
    assert (await house.send()).startswith("250")
    copied = (await house.sink.wait_for(2))[1]
    assert sorted(copied.recipients) == ["ann@example.com", "qa@example.org"]
    house.only("mode=listed", "recipients=example.net")
    assert (await house.send(["ann@example.com", "x@example.net"])).startswith("250")
    assert (await house.sink.wait_for(3))[2].recipients == ("x@example.net",)
    house.only("mode=capture")
    assert (await house.send()).startswith("250")
    await house.running.until(lambda: house.running.queued() == 2, what="two captured")
    assert sum(zone.held for zone in (await house.running.status()).zones) == 2


async def test_two_passwords_are_valid_while_one_is_rotated(house: House) -> None:
    second = user("shop", "battery staple").hash
    house.set()
    house.change("shop", lambda there, limits: (there, replace(limits, second_hash=second)))
    for password in ("correct horse", "battery staple", "battery staple"):
        (await house.log_in(password)).close()
    with pytest.raises(smtplib.SMTPAuthenticationError, match="535"):
        await house.log_in("neither")
    house.change("shop", lambda there, limits: (replace(there, hash=second), replace(limits, second_hash="")))
    (await house.log_in("battery staple")).close()
    with pytest.raises(smtplib.SMTPAuthenticationError, match="535"):
        await house.log_in()


async def test_the_message_id_is_the_key_of_a_user_that_wants_it(house: House) -> None:
    message = b"Message-ID: <1@example.org>\r\n" + MESSAGE
    house.set("idempotency=message-id", "mode=redirect", "mailbox=qa@example.org")
    first = await house.send(["ann@example.com"], message)
    assert first == await house.send(["ann@example.com"], message)
    assert first != await house.send(["bob@example.com"], message), "other recipients are another message"
    await house.sink.wait_for(2)


@pytest.mark.parametrize("quota", ["messages_per_hour=1", "recipients_per_hour=1"])
async def test_a_repetition_gets_its_first_answer_over_the_quota(house: House, quota: str) -> None:
    house.set(quota)
    keyed = b"Idempotency-Key: order-4711\r\n" + MESSAGE
    first = await house.send(message=keyed)
    assert first.startswith("250 2.0.0 OK queued as")
    assert await house.send(message=keyed) == first
    for message in (MESSAGE, keyed.replace(b"4711", b"4712"), MESSAGE + b"x" * 200_000 + b"\r\n"):
        assert (await house.send(message=message)).startswith("452 4.7.1 Limit of 1 ")
    (row,) = (await house.running.status()).quotas
    assert (row.used, row.most) == (1, 1)
