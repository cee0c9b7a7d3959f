"""A smarthost that wants a log-in: STARTTLS, AUTH as it is told to, and enough SMTP to take messages."""

import asyncio
import base64
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.support.event_log import EventLog, events_into
from tests.support.mail import Names, make_batch, make_courier, make_logins, make_message
from tests.support.sink import Sink
from tests.support.sink_conversation import Conversation, Manners
from zonerelay.config.settings import CredentialSettings, ZoneSettings
from zonerelay.delivery.auth.oauth import Post, post
from zonerelay.model.clock import ManualClock
from zonerelay.model.reply import Outcome
from zonerelay.routing.destinations.route import Route

LOOPBACK = "127.0.0.1"
SMARTHOST_PASSWORD = "correct horse battery"
REFUSED_TOKEN = {"status": "401", "schemes": "bearer", "scope": "https://mail.example/"}


def trusted(name: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """Make a certificate for a server that this machine trusts, and no other."""
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    authority.cert_pem.write_to_path(str(directory / "authority.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(directory / "authority.pem"))
    return context


@dataclass(eq=False)
class Smarthost(Sink):
    """`users` and their passwords, `tokens` that XOAUTH2 takes. `logins`: mechanism, user, code of answer;
    `submitters`: who was logged in for each message.

    `auth_reply`: what every AUTH is answered with instead. `junk` goes in front of every reply. `closed`: it
    hangs up at once.
    """

    tls: ssl.SSLContext | None = None
    mechanisms: str = "PLAIN LOGIN XOAUTH2"
    junk: str = ""
    users: Mapping[str, str] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)
    auth_reply: str = ""
    hangs_at_auth: bool = False
    mail_reply: str = ""
    closed: bool = False
    wants_login: bool = True
    logins: list[tuple[str, str, int]] = field(default_factory=list)
    submitters: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    async def start(self) -> None:
        self.manners = Manners(greeting="220 smarthost ESMTP", tls=self.tls)
        await super().start()

    def conversation(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Conversation:
        return _LoginConversation(self, reader, writer)


class _LoginConversation(Conversation):
    def __init__(self, host: Smarthost, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(host, reader, writer)
        self._host = host
        self._user = ""

    async def run(self) -> None:
        if not self._host.closed:
            await super().run()

    async def _command(self, verb: str, argument: str) -> None:
        if verb == "AUTH":
            await self._auth(argument)
        else:
            await super()._command(verb, argument)

    async def _ehlo(self, argument: str) -> None:
        offered: tuple[str, ...] = (f"AUTH {self._host.mechanisms}",) if self._host.mechanisms else ()
        if self._host.tls is not None and not self._tls:
            offered = ("STARTTLS",)
        await self._reply("\n".join(["250 smarthost", *offered]))

    async def _auth(self, argument: str) -> None:
        mechanism, _, first = argument.partition(" ")
        if self._host.hangs_at_auth:
            self._host.logins.append((mechanism, "", 0))
            await asyncio.Event().wait()
        if self._host.auth_reply:
            self._host.logins.append((mechanism, "", int(self._host.auth_reply[:3])))
            await self._reply(self._host.auth_reply)
            return
        user, right = await self._credentials(mechanism, first)
        self._host.logins.append((mechanism, user, 235 if right else 535))
        self._user = user if right else ""
        await self._reply("235 2.7.0 welcome" if right else "535 5.7.8 no such user or password")

    async def _credentials(self, mechanism: str, first: str) -> tuple[str, bool]:
        host = self._host
        if mechanism == "LOGIN":
            user, password = [await self._ask(prompt) for prompt in ("Username:", "Password:")]
            return user, host.users.get(user) == password
        response = base64.b64decode(first).decode() if first else await self._ask("")
        if mechanism == "PLAIN":
            _, user, password = response.split("\0")
            return user, host.users.get(user) == password
        user, bearer = response.rstrip("\x01").split("\x01")
        right = bearer.removeprefix("auth=Bearer ") in host.tokens
        if not right:
            assert await self._ask(json.dumps(REFUSED_TOKEN)) == ""
        return user.removeprefix("user="), right

    async def _ask(self, challenge: str) -> str:
        await self._reply(f"334 {base64.b64encode(challenge.encode()).decode()}")
        return base64.b64decode(await self._line()).decode()

    async def _mail(self, argument: str) -> None:
        if self._host.mail_reply:
            await self._reply(self._host.mail_reply)
        elif self._host.wants_login and not self._user:
            await self._reply("530 5.7.0 Authentication required")
        else:
            await super()._mail(argument)

    async def _answer_message(self, *given: Any) -> None:
        self._host.submitters.append(self._user)
        await super()._answer_message(*given)

    async def _send(self, data: bytes) -> None:
        await super()._send(self._host.junk.encode() + data)


class LoginBed:
    """A courier that logs in, with its clock and what it tells."""

    def __init__(
        self,
        *credentials: CredentialSettings,
        zone: ZoneSettings,
        names: Names,
        directory: Path,
        environment: Mapping[str, str] | None = None,
        post: Post = post,
    ) -> None:
        self.clock = ManualClock()
        self.zone = zone
        self.log = EventLog()
        events = events_into(self.log, self.clock)
        self.metrics = events.metrics.smarthosts
        self.logins = make_logins(
            self.clock,
            *credentials,
            events=events,
            zone=zone,
            directory=directory / "refresh-tokens",
            environment=environment,
            post=post,
        )
        self.metrics.attach(self.logins.login_states)
        self.courier = make_courier(names=names, clock=self.clock, logins=self.logins)

    async def send(self, route: Route, sender: str = "app@example.org") -> Outcome:
        [outcome] = await self.courier.deliver(make_batch(make_message(sender=sender), route, self.zone))
        return outcome

    def events(self) -> list[str]:
        return [name for name, _ in self.log.events]

    def standing(self) -> dict[tuple[str, str], float]:
        (family,) = [each for each in self.metrics.collect() if each.name == "zonerelay_smarthost_login"]
        return {
            (sample.labels["zone"], sample.labels["credential"]): sample.value for sample in family.samples
        }

    async def close(self) -> None:
        await self.courier.pool.close()
        await self.logins.close()
        for _ in range(100):
            if not self.courier.pool.open_connections(self.zone.name):
                return
            await asyncio.sleep(0.01)
        raise AssertionError("a connection is left")
