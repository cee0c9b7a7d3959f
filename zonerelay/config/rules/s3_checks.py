"""[s3]: what must hold between its options, what follows from them, and its secret."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from zonerelay.config.credentials.secrets import SecretError, read_secret
from zonerelay.config.options.problems import Report
from zonerelay.config.settings import Backend, Settings

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"(?:[A-Za-z0-9!_.*'()-]+/)+")
_LOCAL = re.compile(r"localhost|127\.[0-9.]+|::1")
_URLS = ("endpoint_url", "queue_url", "queue_endpoint_url")
MAX_PREFIX = 200


def check_s3(settings: Settings, report: Report) -> None:
    s3 = settings.s3
    if not report.sound("s3"):
        return
    if settings.spool.backend is Backend.S3 and not s3.bucket:
        report.refuse(("s3", "bucket"), 'is needed with backend = "s3": the name of a bucket that exists')
    elif s3.bucket and not _BUCKET.fullmatch(s3.bucket):
        text = "is no name of a bucket: 3 to 63 small letters, digits, dots and hyphens"
        report.refuse(("s3", "bucket"), text)
    if not _PREFIX.fullmatch(s3.prefix) or len(s3.prefix) > MAX_PREFIX:
        text = f"must be ASCII that ends in a slash, such as zonerelay/, at most {MAX_PREFIX} characters"
        report.refuse(("s3", "prefix"), text)
    for name in _URLS:
        if problem := _url_problem(getattr(s3, name)):
            report.refuse(("s3", name), problem)
    if bool(s3.access_key) != bool(s3.secret_key):
        report.refuse(
            ("s3", "secret_key" if s3.access_key else "access_key"), "goes with the other of the two"
        )
    if settings.spool.backend is Backend.S3 and not s3.shared and settings.workers != 1:
        report.refuse(("s3", "shared"), "false is for one relay alone, and workers are relays: workers = 1")
    if s3.queue_url and not s3.shared:
        report.refuse(("s3", "queue_url"), "is of no use with shared = false: leave one of the two out")


def try_s3(settings: Settings, environment: Mapping[str, str], report: Report) -> None:
    """What a start would find out: is the secret there?"""
    if settings.spool.backend is Backend.S3 and settings.s3.secret_key:
        try:
            read_secret(settings.s3.secret_key, environment)
        except SecretError as error:
            report.refuse(("s3", "secret_key"), str(error))


def s3_advice(settings: Settings) -> Iterator[str]:
    s3 = settings.s3
    if settings.spool.backend is not Backend.S3:
        return
    if s3.lease <= s3.timeout:
        yield (
            "s3.lease: not longer than s3.timeout: one slow answer can cost the lease, and mail is then sent "
            "twice"
        )
    for name in _URLS:
        url = urlsplit(getattr(s3, name))
        if url.scheme == "http" and not _LOCAL.fullmatch(url.hostname or ""):
            yield f"s3.{name}: mail travels to the service in clear text: https:// uses TLS"


def _url_problem(url: str) -> str:
    """Why it cannot be used, "" when it can, or is empty."""
    if not url:
        return ""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - it raises what is wrong with it
    except ValueError:
        return 'is no URL: write "https://HOST"'
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        return "must begin with https:// (or http://) and name a host"
    if parts.username or parts.password:
        return "holds a name or password: say access_key, and in secret_key where the secret is"
    return ""
