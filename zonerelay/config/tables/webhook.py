"""[[webhook]] and [report]: events sent to other programs over HTTP, and the daily report by mail.

No secret is in a text of this module.
"""

from __future__ import annotations

import base64
import binascii
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from zonerelay.config.credentials.secrets import SecretError, read_secret
from zonerelay.config.options import forms
from zonerelay.config.options import options as declare
from zonerelay.config.options.options import DAY
from zonerelay.config.problems import Findings

EVENTS = (
    "message.accepted", "delivery.delivered", "delivery.deferred", "delivery.bounced", "delivery.expired",
    "delivery.in_doubt", "delivery.held", "destination.suspended", "destination.resumed",
    "spool.unhealthy", "spool.recovered",
)  # fmt: skip


class WebhookAddresses(enum.StrEnum):
    """How webhook events contain addresses."""

    PSEUDONYM = "pseudonym"
    CLEAR = "clear"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings:
    """An HTTP endpoint that receives signed events of mail (docs/operate/webhooks.md)."""

    name: str = declare.text("webhook", form=forms.name)
    """The name in logs, metrics and zonerelay webhook."""
    url: str = declare.text("")
    """The https:// URL to which events are posted."""
    events: tuple[str, ...] = declare.texts(())
    """The types of events to post. Empty: all."""
    secret: str = declare.text("", form=forms.secret)
    """The place of the signing secret, as in password of [[credential]]: whsec_ and 24 to 64 bytes in base64
    (HMAC-SHA256), or whsk_ and 32 bytes (Ed25519).
    """
    old_secrets: tuple[str, ...] = declare.texts((), form=forms.secret)
    """The places of former secrets. During a key rotation, events are signed with all secrets."""
    addresses: WebhookAddresses = declare.choice(WebhookAddresses.PSEUDONYM)
    """pseudonym: events contain the pseudonyms of the log. clear: they contain addresses."""
    private: bool = declare.switch(False)
    """Allow addresses that are not public (loopback, 10.0.0.0/8 …) and http:// URLs."""
    timeout: float = declare.duration(20.0, least=1.0, most=60.0)
    """The time limit for the endpoint's response."""
    max_queued: int = declare.count(10_000, least=100, most=1_000_000)
    """The maximum number of waiting events in a worker's spool. Then the oldest are dropped, and an event
    webhook.gap has their number.
    """
    max_age: float = declare.duration(3 * DAY, least=60.0, most=14 * DAY)
    """Events that wait longer are dropped in the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSettings:
    """The daily report by mail (docs/operate/report.md)."""

    to: tuple[str, ...] = declare.texts((), form=forms.address)
    """The recipients of the report: "postmaster@example.com"."""
    at: str = declare.text("06:00", form=forms.time_of_day)
    """The local time at which it is sent. A missed report is sent at the next start."""
    sender: str = declare.text("", form=forms.address)
    """The sender, in the envelope and in From. Empty: postmaster at the relay's hostname."""


def webhook_problems(webhook: WebhookSettings) -> Findings:
    parts = urlsplit(webhook.url)
    if not webhook.url:
        yield "url", 'is missing: write where events go, as in "https://app.example.com/mail-events"', "url"
    elif not parts.hostname or parts.scheme not in ("https", "http"):
        yield "url", 'is not an address that events can be posted to: write "https://…"'
    elif parts.scheme == "http" and not webhook.private:
        yield "url", "http:// is for everyone to read on the way: use https, or private = true"
    if not webhook.secret:
        yield "secret", 'is missing: say where it is, as in "/etc/zonerelay/hook.secret"'


def webhook_advice(webhook: WebhookSettings) -> Findings:
    if webhook.addresses is WebhookAddresses.CLEAR:
        yield "addresses", f"clear: {webhook.name} is told the addresses of people"


def webhook_keys(webhook: WebhookSettings, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the secret that signs, then the former ones. Raise SecretError if one cannot be read."""
    keys = {place: read_secret(place, environment) for place in (webhook.secret, *webhook.old_secrets)}
    for each in keys.items():
        check_webhook_key(*each)
    return tuple(keys.values())


def check_webhook_key(place: str, secret: str) -> None:
    """Raise SecretError if events cannot be signed with the secret."""
    kind, _, encoded = secret.partition("_")
    try:
        octets = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except binascii.Error as error:
        raise SecretError(f"{place} is not valid base64 after its prefix") from error
    if (kind, len(octets)) != ("whsk", 32) and not (kind == "whsec" and 24 <= len(octets) <= 64):
        raise SecretError(f"{place} must contain whsec_ with 24 to 64 bytes in base64, or whsk_ with 32")
