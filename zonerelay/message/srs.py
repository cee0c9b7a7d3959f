"""The Sender Rewriting Scheme, with the Guarded scheme of libsrs2 and Mail::SRS. No I/O, no clock.

Mail that is forwarded with its first sender fails SPF at the next host, for that sender's domain does not
list this relay. SRS makes the sender an address in a domain of ours that holds the first one, and that
nobody else can make, for a keyed hash is in it: `SRS0=HHHH=TT=first.example=ann@srs.example`. A
sender that another forwarder has made so is not wrapped once more: `SRS1=HHHH=other.example==…` sends reports
to that forwarder, which knows the way from there. The address stays as long as it is.

Policies:

- The hash has 4 base64 characters, as everywhere: addresses that postsrsd or another has made with the same
  secret are taken, and the other way round, so that relays can be exchanged. Cases are not compared, since
  servers change them, so one guess in a million is right; what it buys is a report to one address. Longer
  hashes would cost room in a local part of 64 octets; they are taken.
- The day of a time stamp may be tomorrow: machines that share a secret share no clock.
- A local part that becomes too long (RFC 5321 4.5.3.1.1) is an error, not a shortened address.
- Local parts in quotes are wrapped without them, and get them back where they need them.
"""

from __future__ import annotations

import base64
import enum
import hmac
import re
from collections.abc import Sequence

from zonerelay.config.rewriting import SrsSettings
from zonerelay.model.address import NULL_SENDER, Mailbox, domain_of, local_part
from zonerelay.smtp.paths import CommandError, reverse_path

HASH_LENGTH = 4
DAY = 86_400.0
DAYS = 1024
"""What two characters of base 32 can tell apart: almost three years, of which `max_age` is at most one."""

_BASE32 = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
_SRS0 = re.compile(r"SRS0[=+-]([^=]+)=([^=]+)=([^=]+)=(.*)", re.IGNORECASE)
_SRS1 = re.compile(r"SRS1[=+-]([^=]+)=([^=]+)=([=+-].+)", re.IGNORECASE)
_TAG = re.compile(r"SRS[01][=+-]", re.IGNORECASE)
_STAMP = re.compile(r"[A-Z2-7]{2}")
_ESCAPED = re.compile(r"\\(.)")
_SPECIAL = re.compile(r'(["\\])')
# RFC 5321 4.1.2, 6531 3.3: whatever is no dot-string is written in quotes.
_DOT_STRING = re.compile(
    r"(?:[\w!#$%&'*+/=?^`{|}~-]|[^\x00-\x7f])+(?:\.(?:[\w!#$%&'*+/=?^`{|}~-]|[^\x00-\x7f])+)*"
)


class SrsFault(enum.StrEnum):
    MALFORMED = "malformed"
    WRONG_HASH = "wrong_hash"
    EXPIRED = "expired"
    TOO_LONG = "too_long"


class SrsError(Exception):
    """`kind` is safe for logs and metrics; an address is in no text of it."""

    def __init__(self, kind: SrsFault) -> None:
        super().__init__(kind.replace("_", " "))
        self.kind = kind


class Srs:
    """`secrets`: the first signs, all are accepted. Raises ValueError when there is none."""

    def __init__(self, settings: SrsSettings, secrets: Sequence[str]) -> None:
        if not secrets or not all(secrets):
            raise ValueError("srs: there is no secret to sign with")
        self.domain = settings.domain.lower()
        self._keys = tuple(secret.encode() for secret in secrets)
        self._max_days = int(settings.max_age // DAY)
        own = (self.domain, *(domain.lower() for domain in settings.local_domains))
        self._local = frozenset(domain for domain in own if not domain.startswith("*."))
        self._local_parents = frozenset(domain[2:] for domain in own if domain.startswith("*."))

    def forward(self, sender: Mailbox, now: float) -> Mailbox:
        """The sender to show to the next host: the same for the null sender and local domains.

        Raises SrsError TOO_LONG. `now` is Unix time.
        """
        domain = domain_of(sender)
        if sender == NULL_SENDER or self._is_local(domain):
            return sender
        local = _unquoted(local_part(sender))
        # As it was sent: whoever reads the report may care for the case.
        written = sender.rpartition("@")[2]
        if _SRS0.fullmatch(local):
            again = local[4:]  # with its separator
            return self._wrapped(f"SRS1={self._hash(written, again)}={written}={again}")
        if found := _SRS1.fullmatch(local):
            _, first, rest = found.groups()
            return self._wrapped(f"SRS1={self._hash(first, rest)}={first}={rest}")
        stamp = _stamp(now)
        return self._wrapped(f"SRS0={self._hash(stamp, written, local)}={stamp}={written}={local}")

    def reverse(self, recipient: Mailbox, now: float) -> Mailbox | None:
        """Whom a report to this address is for; `None` when the address is not one that SRS makes here.

        Raises SrsError.
        """
        if domain_of(recipient) != self.domain:
            return None
        local = _unquoted(local_part(recipient))
        if not _TAG.match(local):
            return None
        if found := _SRS0.fullmatch(local):
            given, stamp, domain, user = found.groups()
            self._check(given, stamp, domain, user)
            if not self._is_recent(stamp.upper(), now):
                raise SrsError(SrsFault.EXPIRED)
            return _mailbox(user, domain)
        if found := _SRS1.fullmatch(local):
            given, domain, rest = found.groups()
            self._check(given, domain, rest)
            return _mailbox(f"SRS0{rest}", domain)
        raise SrsError(SrsFault.MALFORMED)

    def _is_local(self, domain: str) -> bool:
        if domain in self._local:
            return True
        while self._local_parents and (dot := domain.find(".")) >= 0:
            domain = domain[dot + 1 :]
            if domain in self._local_parents:
                return True
        return False

    def _wrapped(self, local: str) -> Mailbox:
        return _mailbox(local, self.domain)

    def _hash(self, *parts: str) -> str:
        return _digest(self._keys[0], parts)[:HASH_LENGTH]

    def _check(self, given: str, *parts: str) -> None:
        if len(given) < HASH_LENGTH or not given.isascii():
            raise SrsError(SrsFault.WRONG_HASH)
        given = given.lower()
        for key in self._keys:
            if hmac.compare_digest(given, _digest(key, parts)[: len(given)].lower()):
                return
        raise SrsError(SrsFault.WRONG_HASH)

    def _is_recent(self, stamp: str, now: float) -> bool:
        if not _STAMP.fullmatch(stamp):
            return False
        then = _BASE32.index(stamp[0]) * 32 + _BASE32.index(stamp[1])
        age = (int(now // DAY) - then) % DAYS
        return age <= self._max_days or age == DAYS - 1


def _digest(key: bytes, parts: Sequence[str]) -> str:
    """Over ASCII letters in lower case, as libsrs2 does it, whatever the characters around them."""
    mac = hmac.digest(key, "".join(parts).encode().lower(), "sha1")
    return base64.b64encode(mac).decode().rstrip("=")


def _stamp(now: float) -> str:
    day = int(now // DAY) % DAYS
    return _BASE32[day // 32] + _BASE32[day % 32]


def _unquoted(local: str) -> str:
    return _ESCAPED.sub(r"\1", local[1:-1]) if local.startswith('"') else local


def _mailbox(local: str, domain: str) -> Mailbox:
    if not _DOT_STRING.fullmatch(local):
        local = '"' + _SPECIAL.sub(r"\\\1", local) + '"'
    text = f"<{local}@{domain}>"
    try:
        mailbox, rest = reverse_path(text)
    except CommandError as error:
        too_long = "too long" in error.reply.text
        raise SrsError(SrsFault.TOO_LONG if too_long else SrsFault.MALFORMED) from error
    if rest:
        raise SrsError(SrsFault.MALFORMED)
    return mailbox
