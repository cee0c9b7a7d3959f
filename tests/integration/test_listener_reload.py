"""Other settings for a running relay's listeners: what new sessions get, what open ones keep, what fails."""

import asyncio
import hashlib
import smtplib
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.certificates import DAY, Made, make
from tests.support.credentials import file_of, user
from tests.support.ports import LOOPBACK, free_ports
from tests.support.relay import Running, relay_with, settings
from tests.support.tls_client import trusting
from zonerelay.config import settings as tables
from zonerelay.config.settings import AuthSettings, ListenerAuth, ListenerSettings, ListenerTls
from zonerelay.inbound.cleanup.submit import Principal, Rejection, SubmitCall, SubmittedEnvelope
from zonerelay.inbound.listen import listeners
from zonerelay.inbound.listen.listener import Listener
from zonerelay.inbound.state.context import AskedPolicy
from zonerelay.model.envelope import Mailbox
from zonerelay.smtp.server.params import MailCommand

MESSAGE = b"From: app@example.org\r\nSubject: x\r\n\r\nhello\r\n"


@dataclass
class Session:
    """One client's connection; every call in a thread, for the relay runs in this one."""

    smtp: smtplib.SMTP

    async def starttls(self) -> None:
        await asyncio.to_thread(self.smtp.starttls, context=trusting())
        await asyncio.to_thread(self.smtp.ehlo)

    async def login(self, name: str = "app", password: str = "correct horse") -> int:
        # smtplib's login() would try every mechanism, and each failure is answered later than the one before.
        self.smtp.user, self.smtp.password = name, password
        try:
            code, _ = await asyncio.to_thread(self.smtp.auth, "PLAIN", self.smtp.auth_plain)
        except smtplib.SMTPAuthenticationError as error:
            return int(error.smtp_code)
        return code

    async def mail(self) -> int:
        code, _ = await asyncio.to_thread(self.smtp.mail, "app@example.org")
        return code

    async def rcpt(self, recipient: str = "someone@example.com") -> int:
        """A new transaction up to RCPT."""
        await asyncio.to_thread(self.smtp.docmd, "RSET")
        await self.mail()
        code, _ = await asyncio.to_thread(self.smtp.rcpt, recipient)
        return code

    async def send(self) -> None:
        await asyncio.to_thread(self.smtp.sendmail, "app@example.org", ["someone@example.com"], MESSAGE)

    async def is_closed_by_server(self) -> bool:
        code, _ = await asyncio.to_thread(self.smtp.getreply)
        return code == 421

    @property
    def fingerprint(self) -> str:
        assert isinstance(self.smtp.sock, ssl.SSLSocket)
        certificate = self.smtp.sock.getpeercert(binary_form=True)
        assert certificate is not None
        return hashlib.sha256(certificate).hexdigest()


@asynccontextmanager
async def session(address: str, *, implicit: bool = False) -> AsyncIterator[Session]:
    host, _, port = address.rpartition(":")

    def connect() -> smtplib.SMTP:
        smtp = (
            smtplib.SMTP_SSL(host, int(port), timeout=10, context=trusting())
            if implicit
            else smtplib.SMTP(host, int(port), timeout=10)
        )
        smtp.ehlo()
        return smtp

    opened = Session(await asyncio.to_thread(connect))
    try:
        yield opened
    finally:
        await asyncio.to_thread(opened.smtp.close)


async def shown(address: str) -> str:
    """The fingerprint of the certificate that a new client is shown."""
    async with session(address) as client:
        await client.starttls()
        return client.fingerprint


def certificate(name: str = "relay.test") -> Made:
    return make(name, starts=time.time() - DAY, ends=time.time() + 90 * DAY)


def listener(**options: object) -> ListenerSettings:
    (port,) = free_ports(1)
    return ListenerSettings(address=f"{LOOPBACK}:{port}", **options)  # type: ignore[arg-type]  # as given


def with_tls(directory: Path, made: Made, name: str = "relay", **options: object) -> ListenerSettings:
    certificate_file, key = made.write(directory, name)
    return listener(tls=ListenerTls.STARTTLS, certificate=(certificate_file,), key=(key,), **options)


def chosen(directory: Path, *listeners: ListenerSettings) -> tables.Settings:
    first = settings(directory, zone=tables.ZoneSettings(next_hop=f"{LOOPBACK}:1"), listener=listeners[0])
    return replace(first, listener=listeners)


async def reload(running: Running, **changes: object) -> None:
    await running.worker.reload(replace(running.worker.settings, **changes))  # type: ignore[arg-type]  # as given


async def test_a_new_certificate_is_for_new_sessions_and_open_ones_go_on(tmp_path: Path) -> None:
    old, new = certificate(), certificate()
    first = with_tls(tmp_path, old)
    async with relay_with(chosen(tmp_path, first)) as running, session(first.address) as open_one:
        await open_one.starttls()
        files = new.write(tmp_path, "other")
        await reload(running, listener=(replace(first, certificate=files[:1], key=files[1:]),))
        assert await shown(first.address) == new.fingerprint
        (third := certificate()).write(tmp_path, "other")
        await reload(running)
        assert await shown(first.address) == third.fingerprint, "the same files, read at once"
        assert open_one.fingerprint == old.fingerprint
        await open_one.send()
        assert running.log.named("accepted")
        assert (await running.status()).problems == ()


async def test_a_renewal_by_certbot_is_taken_up_in_about_a_second_without_a_signal(tmp_path: Path) -> None:
    old, new = certificate(), certificate()
    archive = tmp_path / "archive"
    archive.mkdir()
    live = tmp_path / "live.pem", tmp_path / "live.key"
    for link, file in zip(live, old.write(archive, "one"), strict=True):
        link.symlink_to(file)
    first = listener(tls=ListenerTls.STARTTLS, certificate=live[:1], key=live[1:])
    async with relay_with(chosen(tmp_path, first)), session(first.address) as open_one:
        await open_one.starttls()
        assert open_one.fingerprint == old.fingerprint
        swapped = asyncio.get_running_loop().time()
        for link, file in zip(live, new.write(archive, "two"), strict=True):
            link.unlink()
            link.symlink_to(file)
        while await shown(first.address) == old.fingerprint:
            await asyncio.sleep(0.05)
        assert asyncio.get_running_loop().time() - swapped < 3
        assert await shown(first.address) == new.fingerprint
        await open_one.send()


async def test_a_certificate_that_is_not_there_leaves_the_listener_as_it_was(tmp_path: Path) -> None:
    made = certificate()
    first = with_tls(tmp_path, made)
    async with relay_with(chosen(tmp_path, first)) as running, session(first.address) as open_one:
        wrong = replace(first, certificate=(tmp_path / "none.pem",), max_message_size=1024)
        await reload(running, listener=(wrong,))
        assert await shown(first.address) == made.fingerprint
        async with session(first.address) as client:
            assert client.smtp.esmtp_features["size"] == str(first.max_message_size)
        (problem,) = (await running.status()).problems
        assert problem.startswith(f"the listener at {first.address} stays as it was: ")
        assert f"{tmp_path}/none.pem does not exist" in problem
        await open_one.send()

        await reload(running, listener=(replace(first, max_message_size=1024),))
        async with session(first.address) as client:
            assert client.smtp.esmtp_features["size"] == "1024"
        assert (await running.status()).problems == ()


async def test_auth_switched_on_is_for_new_sessions(tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.write_text(file_of(user()))
    plain = listener()
    async with relay_with(chosen(tmp_path, plain)) as running, session(plain.address) as open_one:
        files = certificate().write(tmp_path, "relay")
        guarded = replace(
            plain, tls=ListenerTls.STARTTLS, certificate=files[:1], key=files[1:], auth=ListenerAuth.REQUIRED
        )
        await reload(running, listener=(guarded,), auth=AuthSettings(credentials=users))
        await open_one.send()
        async with session(plain.address) as client:
            assert await client.mail() == 530
            await client.starttls()
            assert client.smtp.has_extn("auth")
            assert await client.login() == 235
            await client.send()
        assert [each["user"] for each in running.log.named("logged-in")] == ["app"]


async def test_a_changed_credentials_file_and_another_one_count_from_the_next_login(tmp_path: Path) -> None:
    users, others = tmp_path / "users", tmp_path / "others"
    users.write_text(file_of(user("app", "correct horse")))
    others.write_text(file_of(user("crm", "battery staple")))
    first = with_tls(tmp_path, certificate(), auth=ListenerAuth.REQUIRED)
    start = replace(chosen(tmp_path, first), auth=AuthSettings(credentials=users))

    async def login(name: str, password: str) -> int:
        async with session(first.address) as client:
            await client.starttls()
            return await client.login(name, password)

    async with relay_with(start) as running, session(first.address) as open_one:
        await open_one.starttls()
        assert await open_one.login() == 235
        users.write_text(file_of(user("app", "another one")))
        assert await login("app", "another one") == 235
        assert await login("app", "correct horse") == 535
        await open_one.send()

        await reload(running, auth=AuthSettings(credentials=others))
        assert await login("crm", "battery staple") == 235
        assert await login("app", "another one") == 535

        others.unlink()
        assert await login("crm", "battery staple") == 454
        (problem,) = (await running.status()).problems
        assert problem == f"{others}: No such file or directory"


async def test_changed_access_rules_are_for_new_sessions(tmp_path: Path) -> None:
    first = listener()
    rule = tables.AccessSettings(recipient=("example.com",))
    async with relay_with(chosen(tmp_path, first)) as running, session(first.address) as open_one:
        await reload(running, access=(rule,))
        async with session(first.address) as client:
            assert await client.rcpt("someone@example.com") == 550
            assert await client.rcpt("someone@example.net") == 250
        assert await open_one.rcpt("someone@example.com") == 250
        await reload(running, access=(tables.AccessSettings(recipient=("someone@-x-",)),))
        async with session(first.address) as client:
            assert await client.rcpt("someone@example.com") == 550
        (problem,) = (await running.status()).problems
        assert problem.endswith('stays active: "-x-" cannot be matched: not a domain name')
        assert running.log.named("reload-refused")
        await reload(running, access=())
        async with session(first.address) as client:
            assert await client.rcpt("someone@example.com") == 250


@pytest.fixture
def policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "policies_of_reload.py").write_text(
        "from zonerelay.inbound.policy import Policy, refuse\n"
        "class Old(Policy):\n"
        "    async def rcpt(self, event): return refuse(550, '7.1', 'Old')\n"
        "class New(Policy):\n"
        "    async def rcpt(self, event): return refuse(551, '7.1', 'New')\n"
        "class Broken(Old):\n"
        "    def __init__(self, context): raise ValueError('policy_file has to be there')\n"
        "closed = []\n"
        "class Closing(Old):\n"
        "    def close(self): closed.append('closed')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "policies_of_reload"


async def test_open_sessions_keep_the_policy_that_they_began_with(policies: str, tmp_path: Path) -> None:
    first = listener(policy=f"{policies}:Old")
    async with relay_with(chosen(tmp_path, first)) as running, session(first.address) as open_one:
        assert await open_one.rcpt() == 550
        for again in ("New", "Broken"):  # one that cannot be made leaves the one before
            await reload(running, listener=(replace(first, policy=f"{policies}:{again}"),))
            async with session(first.address) as client:
                assert await client.rcpt() == 551
        (problem,) = (await running.status()).problems
        assert f"the listener at {first.address} stays as it was: " in problem
        assert "policy_file has to be there" in problem
        await reload(running, listener=(replace(first, policy=""),))
        async with session(first.address) as client:
            assert await client.rcpt() == 250
        assert await open_one.rcpt() == 550


async def test_a_listener_with_tls_is_added_and_taken_away(tmp_path: Path) -> None:
    made = certificate()
    first = listener()
    second = replace(with_tls(tmp_path, made), tls=ListenerTls.IMPLICIT)
    async with relay_with(chosen(tmp_path, first)) as running:
        await reload(running, listener=(first, second))
        assert running.worker.addresses() == [first.address, second.address]
        async with session(second.address, implicit=True) as open_one:
            assert open_one.fingerprint == made.fingerprint
            await open_one.send()
            await reload(running, listener=(first,))
            assert running.worker.addresses() == [first.address]
            assert await open_one.is_closed_by_server()
        with pytest.raises(OSError, match="refused"):
            async with session(second.address, implicit=True):
                pass
        async with session(first.address) as client:
            await client.send()


async def test_a_new_listener_that_cannot_start_does_not_disturb_the_others(tmp_path: Path) -> None:
    first = listener()
    second = listener(tls=ListenerTls.IMPLICIT, certificate=(tmp_path / "none.pem",))
    third = listener()
    async with relay_with(chosen(tmp_path, first)) as running:
        await reload(running, listener=(first, second, third))
        assert running.worker.addresses() == [first.address, third.address]
        (problem,) = (await running.status()).problems
        assert f"cannot offer TLS at {second.address}: {tmp_path}/none.pem does not exist" in problem
        for address in (first.address, third.address):
            async with session(address) as client:
                await client.send()


async def test_without_a_listener_that_could_start_mail_is_refused_for_now_and_its_policy_is_closed(
    policies: str, tmp_path: Path
) -> None:
    first = listener()
    with socket.create_server((LOOPBACK, 0)) as taken:
        second = replace(first, address=f"{LOOPBACK}:{taken.getsockname()[1]}", policy=f"{policies}:Closing")
        async with relay_with(chosen(tmp_path, first)) as running:
            await reload(running, listener=(second,))
            assert running.worker.addresses() == []
            assert vars(sys.modules[policies])["closed"] == ["closed"]
            principal = Principal(protocol="TEST", may_relay=True)
            envelope = SubmittedEnvelope(MailCommand(Mailbox("a@example.org")), ())
            refused = await running.worker.listeners.submit(SubmitCall(principal, envelope), [b""])
            assert isinstance(refused, Rejection)
            assert refused.reply.is_transient


async def test_two_reloads_at_once_are_one_after_the_other(tmp_path: Path) -> None:
    first, second, third = listener(), listener(), listener()
    async with relay_with(chosen(tmp_path, first)) as running:
        await asyncio.gather(
            reload(running, listener=(first, second)), reload(running, listener=(first, second, third))
        )
        assert running.worker.addresses() == [first.address, second.address, third.address]
        assert (await running.status()).problems == ()


@pytest.mark.parametrize("begun", [True, False])
async def test_a_listener_that_a_reload_adds_does_not_outlive_the_relay(begun: bool, tmp_path: Path) -> None:
    first, second = listener(), listener()
    async with relay_with(chosen(tmp_path, first)) as running:
        reloading = asyncio.ensure_future(reload(running, listener=(first, second)))
        if begun:
            await asyncio.sleep(0)
    await reloading
    assert running.worker.addresses() == []
    with pytest.raises(OSError, match="refused"):
        async with session(second.address):
            pass


async def test_a_policy_that_was_replaced_is_closed_with_the_last_session_that_asks_it(
    policies: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "LOOK_EVERY", 0.01)
    looks = 0
    asks = Listener.asks

    def look(self: Listener, policy: AskedPolicy) -> bool:
        nonlocal looks
        looks += 1
        return asks(self, policy)

    monkeypatch.setattr(Listener, "asks", look)
    first = listener(policy=f"{policies}:Old")
    async with relay_with(chosen(tmp_path, first)) as running:
        retiring = running.worker.listeners._retiring
        async with session(first.address) as open_one:
            await reload(running, listener=(replace(first, policy=f"{policies}:New"),))
            for _ in range(3):
                seen = looks
                await running.until(lambda: looks > seen, what="somebody has looked")  # noqa: B023 - at once
                assert await open_one.rcpt() == 550
            assert len(retiring) == 1
        await running.until(lambda: not retiring, what="the policy is closed")
