"""[redis]: what must hold, and what may surprise. No secret is in a text of this module."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator

from zonerelay.config.options.problems import Report
from zonerelay.config.settings import LOSS_WORDS, Backend, Settings

_SCHEMES = ("redis", "rediss", "unix")


def check_redis(settings: Settings, report: Report) -> None:
    redis = settings.redis
    if not report.sound("redis"):
        return
    url = urllib.parse.urlsplit(redis.url)
    if url.scheme not in _SCHEMES:
        text = "must begin with redis://, rediss:// (TLS) or unix://"
        report.refuse(("redis", "url"), text)
    elif url.password or url.username:
        report.refuse(("redis", "url"), "holds a name or password: say user, and in password where it is")
    if redis.ca_file is not None and url.scheme != "rediss":
        report.refuse(("redis", "ca_file"), "is of no use without TLS: the url must begin with rediss://")
    if not redis.prefix or re.search(r"[^!-~]", redis.prefix):
        report.refuse(("redis", "prefix"), "must be printable ASCII without spaces, at least one character")
    if redis.accept_loss not in ("", LOSS_WORDS):
        text = f'if mail may be lost, say exactly "{LOSS_WORDS}"'
        report.refuse(("redis", "accept_loss"), text)


def redis_advice(settings: Settings) -> Iterator[str]:
    redis = settings.redis
    if settings.spool.backend is not Backend.REDIS:
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
