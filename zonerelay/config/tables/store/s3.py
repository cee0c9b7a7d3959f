"""[s3]: the queue in an S3 bucket. No secret is in a text of this module."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from zonerelay.config.options import forms
from zonerelay.config.options.options import MINUTE, choice, count, duration, optional_path, switch, text
from zonerelay.config.problems import Report
from zonerelay.config.tables.store.spool import Backend, SpoolSettings

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"(?:[A-Za-z0-9!_.*'()-]+/)+")
_LOCAL = re.compile(r"localhost|127\.[0-9.]+|::1")
_URLS = ("endpoint_url", "queue_url", "queue_endpoint_url")
MAX_PREFIX = 200


class Addressing(enum.StrEnum):
    AUTO = "auto"
    PATH = "path"
    VIRTUAL = "virtual"


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Settings:
    """[s3]: used when `[spool] backend` says so."""

    bucket: str = text("")
    """The bucket, which has to exist."""
    prefix: str = text("zonerelay/")
    """What the keys of all objects begin with. Relays with the same bucket and prefix share one queue."""
    endpoint_url: str = text("", optional=True)
    """The service, if it is not Amazon's: "https://s3.example.org". Any that speaks S3, as OpenStack Swift
    does with s3api.
    """
    region: str = text("", optional=True)
    """Its region. Empty: what the environment says, or us-east-1."""
    addressing: Addressing = choice(Addressing.AUTO)
    """Where the bucket's name goes: path (https://HOST/BUCKET/), virtual (https://BUCKET.HOST/); auto is path
    with an endpoint_url and virtual without.
    """
    access_key: str = text("", optional=True)
    """The id of the access key. Empty: the environment (AWS_ACCESS_KEY_ID …), the shared files of the AWS
    tools, or the role of the machine.
    """
    secret_key: str = text("", form=forms.secret)
    """Where the secret of that key is: a file, env:NAME or credential:NAME."""
    ca_file: Path | None = optional_path()
    """Whose certificates to trust with https; empty: the system's."""
    shared: bool = switch(True)
    """Several relays may share the queue. It takes a service with conditional writes, which is tried at each
    start. false makes do without them, for one relay alone: a second one is refused.
    """
    lease: float = duration(30.0, least=1.0, most=10 * MINUTE)
    """How long the mail of this relay stays its own when it is not heard of; then other relays take it over.
    Longer than any pause of a relay that is alive.
    """
    timeout: float = duration(10.0, most=5 * MINUTE)
    """How long to wait for the service's answer to one request."""
    max_requests: int = count(50, most=1000)
    """Requests to the service at the same time."""
    queue_url: str = text("", optional=True)
    """An SQS queue through which relays tell each other of mail that is left to a relay with room. Empty:
    they list the bucket.
    """
    queue_endpoint_url: str = text("", optional=True)
    """The service of that queue, if it is not Amazon's."""


def check_s3(s3: S3Settings, spool: SpoolSettings, workers: int, report: Report) -> None:
    if not report.sound("s3"):
        return
    if spool.backend is Backend.S3 and not s3.bucket:
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
    if spool.backend is Backend.S3 and not s3.shared and workers != 1:
        report.refuse(("s3", "shared"), "false is for one relay alone, and workers are relays: workers = 1")
    if s3.queue_url and not s3.shared:
        report.refuse(("s3", "queue_url"), "is of no use with shared = false: leave one of the two out")


def s3_advice(s3: S3Settings, spool: SpoolSettings) -> Iterator[str]:
    if spool.backend is not Backend.S3:
        return
    yield "spool.backend: s3: messages with an idempotency key are refused, a bucket cannot remember keys"
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
    """Returns the reason why the URL cannot be used, "" when it can or is empty."""
    if not url:
        return ""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - it raises what is wrong with it
    except ValueError:
        return 'is no URL: write "https://HOST"'
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        return "must begin with https:// (or http://) and name a host"
    if "@" in url or parts.query or parts.fragment:
        return "holds more than an address: say access_key, and in secret_key where the secret is"
    return ""
