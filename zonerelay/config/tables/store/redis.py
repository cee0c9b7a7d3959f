"""[redis]: the queue on a Redis server. No secret is in a text of this module."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zonerelay.config.options import forms
from zonerelay.config.options.options import MINUTE, count, duration, optional_path, text
from zonerelay.config.problems import Report
from zonerelay.config.tables.store.spool import LOSS_WORDS, Backend, SpoolSettings

_SCHEMES = ("redis", "rediss", "unix")


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """[redis]: used when `[spool] backend` says so."""

    url: str = text("redis://127.0.0.1:6379/0")
    """redis://HOST:PORT/DATABASE, rediss:// (TLS) or unix:///PATH?db=DATABASE. The password is not here."""
    user: str = text("")
    """The ACL user to log in as; empty: the server's default user."""
    password: str = text("", form=forms.secret)
    """Where the password is: a file, env:NAME or credential:NAME. Empty: none is needed."""
    ca_file: Path | None = optional_path()
    """Whose certificates to trust with rediss://; empty: the system's."""
    prefix: str = text("zonerelay:")
    """What the names of all keys begin with. Relays with the same server, database and prefix share one
    queue. In braces ({zonerelay}:) the queue stays in one slot of a cluster.
    """
    lease: float = duration(30.0, least=1.0, most=10 * MINUTE)
    """How long the deliveries that this relay has claimed stay its own when it is not heard of; then other
    relays take them over. Longer than any pause of a relay that is alive.
    """
    replicas: int = count(0, least=0, most=16, optional=True)
    """Replicas of the server that must have a message before it is acknowledged (WAIT). With fewer of them no
    mail is taken.
    """
    timeout: float = duration(10.0, most=MINUTE)
    """How long to wait for an answer before the connection is given up and made again."""
    accept_loss: str = text("")
    """The words "I understand that acknowledged mail may be lost", exactly so, make do with a server that
    does not sync its append-only file before it answers, that evicts keys or does not say. Without them it is
    refused.
    """


def check_redis(redis: RedisSettings, report: Report) -> None:
    if not report.sound("redis"):
        return
    url = urllib.parse.urlsplit(redis.url)
    if url.scheme not in _SCHEMES:
        text = "must begin with redis://, rediss:// (TLS) or unix://"
        report.refuse(("redis", "url"), text)
    elif "@" in url.netloc + url.path or any(
        word in key.lower() for key in urllib.parse.parse_qs(url.query) for word in ("password", "username")
    ):
        report.refuse(("redis", "url"), "holds a name or password: say user, and in password where it is")
    if redis.ca_file is not None and url.scheme != "rediss":
        report.refuse(("redis", "ca_file"), "is of no use without TLS: the url must begin with rediss://")
    if not redis.prefix or re.search(r"[^!-~]", redis.prefix):
        report.refuse(("redis", "prefix"), "must be printable ASCII without spaces, at least one character")
    if redis.accept_loss not in ("", LOSS_WORDS):
        text = f'if mail may be lost, say exactly "{LOSS_WORDS}"'
        report.refuse(("redis", "accept_loss"), text)


def redis_advice(redis: RedisSettings, spool: SpoolSettings) -> Iterator[str]:
    if spool.backend is not Backend.REDIS:
        return
    if redis.accept_loss:
        yield "redis.accept_loss: acknowledged mail may be lost when the server or its machine stops"
    if redis.lease <= redis.timeout:
        yield (
            "redis.lease: not longer than redis.timeout: one slow answer can cost the lease, and mail is "
            "then sent twice"
        )
    if redis.url.startswith("redis://") and not _is_local(redis.url):
        yield "redis.url: mail travels to the server in clear text: rediss:// uses TLS"


def _is_local(url: str) -> bool:
    return urllib.parse.urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1", None)
