"""Implements the Sender Rewriting Scheme (SRS), compatible with libsrs2 and Mail::SRS. No I/O, no clock.

Mail that is forwarded with its first sender fails SPF at the next host, because that sender's domain does not
list this relay. SRS replaces the sender by an address in a domain of ours that contains the first one and a
keyed hash, so that others cannot make such an address: `SRS0=HHHH=TT=first.example=ann@srs.example`. A sender
that another forwarder has rewritten is not wrapped again: `SRS1=HHHH=other.example==…` sends reports to that
forwarder, which knows the rest of the path. The address keeps its length.

Policies:

- The hash is 40 bits of HMAC-SHA-256, 8 characters of base 32, so that a changed case does no harm. The
  length of each part is hashed, so no other parts have the same hash. The hash covers the whole number of the
  day, of which the address shows the last two digits: an address older than `DAYS` has a wrong hash.
- `SRS1=` has a day, too: the two characters in front of its hash.
- The old form, which postsrsd and others make with the same secret, has 4 characters of base64 in any case,
  so one guess in a million is right, over parts that are joined without a separator: a hash for
  mbob@victim.co is right for bob@victim.com. (Longer hashes, as postsrsd makes them on request, are accepted
  too.) It is read where `accept_legacy` says so.
- The day of a time stamp may be tomorrow, because machines that share a secret share no clock.
- An address that becomes too long for a path (RFC 5321 4.5.3.1.3) is an error, not a shortened address.
- Local parts in quotes are wrapped without them, and get them back where they need them. Dots anywhere need
  none (`smtp/server/paths.py`).
"""

import base64
import enum
import hmac
import re
from collections.abc import Sequence

from zonerelay.config.settings import SrsSettings
from zonerelay.model.envelope import NULL_SENDER, Mailbox, domain_of, local_part
from zonerelay.smtp.server.paths import CommandError, PathTooLongError, reverse_path

HASH_LENGTH = 8
OLD_HASH_LENGTH = 4
DAY = 86_400.0
DAYS = 1024
"""Days that two characters of base 32 can tell apart: almost three years. `max_age` is one year at most."""

_BASE32 = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
_SRS0 = re.compile(r"SRS0[=+-]([^=]+)=([^=]+)=([^=]+)=(.*)", re.IGNORECASE)
_SRS1 = re.compile(r"SRS1[=+-]([^=]+)=([^=]+)=([=+-].+)", re.IGNORECASE)
_NEW_SRS0 = re.compile(rf"[A-Za-z2-7]{{{HASH_LENGTH}}}")
_NEW_SRS1 = re.compile(rf"[A-Za-z2-7]{{{2 + HASH_LENGTH}}}")
_TAG = re.compile(r"SRS[01][=+-]", re.IGNORECASE)
_STAMP = re.compile(r"[A-Z2-7]{2}")
_ESCAPED = re.compile(r"\\(.)")
_SPECIAL = re.compile(r'(["\\])')
# RFC 5321 4.1.2, 6531 3.3: whatever is no dot-string is written in quotes.
_NEEDS_NO_QUOTES = re.compile(r"\.*+(?:(?:[\w!#$%&'*+/=?^`{|}~-]|[^\x00-\x7f])++\.*+)++")


class SrsFault(enum.StrEnum):
    """The reason why an SRS address is invalid."""

    MALFORMED = "malformed"
    WRONG_HASH = "wrong_hash"
    EXPIRED = "expired"
    OLD_FORM = "old_form"
    TOO_LONG = "too_long"


class SrsError(Exception):
    """The address cannot be rewritten or restored. `kind` is safe for logs and metrics; no text contains an
    address. `delay` is the delay of the reply in seconds.
    """

    delay = 0.0

    def __init__(self, kind: SrsFault) -> None:
        super().__init__(kind.replace("_", " "))
        self.kind = kind


class Srs:
    """Rewrites and restores SRS addresses. The first of the `secrets` signs, and all are accepted. Raises
    ValueError if there is none.
    """

    def __init__(self, settings: SrsSettings, secrets: Sequence[str]) -> None:
        if not secrets or not all(secrets):
            raise ValueError("srs: no secret for signing is configured")
        self.domain = settings.domain.lower()
        self._keys = tuple(secret.encode() for secret in secrets)
        self._max_days = int(settings.max_age // DAY)
        self._accept_legacy = settings.accept_legacy
        own = (self.domain, *(domain.lower() for domain in settings.local_domains))
        self._local = frozenset(domain for domain in own if not domain.startswith("*."))
        self._local_parents = frozenset(domain[2:] for domain in own if domain.startswith("*."))

    def forward(self, sender: Mailbox, now: float) -> Mailbox:
        """Rewrite a sender for the next hop. The null sender and senders in local domains stay unchanged.

        `now` is Unix time. Raise SrsError TOO_LONG.
        """
        domain = domain_of(sender)
        if sender == NULL_SENDER or self._is_local(domain):
            return sender
        local = _unquoted(local_part(sender))
        # The case is kept, because the reader of the report may need it.
        written = sender.rpartition("@")[2]
        today = int(now // DAY)
        stamp = _stamp(today)
        if _SRS0.fullmatch(local):
            return self._chained(today, written, local[4:])  # with its separator
        if found := _SRS1.fullmatch(local):
            return self._chained(today, found[2], found[3])
        hashed = _hash(self._keys[0], "SRS0", today, written, local)
        return _mailbox(f"SRS0={hashed}={stamp}={written}={local}", self.domain)

    def _chained(self, today: int, first: str, rest: str) -> Mailbox:
        hashed = _hash(self._keys[0], "SRS1", today, first, rest)
        return _mailbox(f"SRS1={_stamp(today)}{hashed}={first}={rest}", self.domain)

    def is_in_old_form(self, recipient: Mailbox) -> bool:
        """Return whether the address is an SRS address in the old format, which postsrsd and other programs
        create.
        """
        if domain_of(recipient) != self.domain:
            return False
        local = _unquoted(local_part(recipient))
        found = _SRS0.fullmatch(local) or _SRS1.fullmatch(local)
        return found is not None and not _is_new(found)

    def reverse(self, recipient: Mailbox, now: float) -> Mailbox | None:
        """Restore the recipient of a bounce from an SRS address, or return `None` if it is not one of this
        relay's domain.

        Raise SrsError.
        """
        if domain_of(recipient) != self.domain:
            return None
        local = _unquoted(local_part(recipient))
        if not _TAG.match(local):
            return None
        today = int(now // DAY)
        if found := _SRS0.fullmatch(local):
            given, stamp, domain, user = found.groups()
            right = _is_new(found) and self._is_right(given, "SRS0", _day(stamp, today), domain, user)
            if not right:
                self._check_old(found, given, stamp, domain, user)
            self._check_day(_day(stamp, today), today)
            return _mailbox(user, domain)
        if found := _SRS1.fullmatch(local):
            given, domain, rest = found.groups()
            day = _day(given[:2], today)
            if _is_new(found) and self._is_right(given[2:], "SRS1", day, domain, rest):
                self._check_day(day, today)
            else:
                self._check_old(found, given, domain, rest)
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

    def _is_right(self, given: str, tag: str, day: int | None, *parts: str) -> bool:
        given = given.upper()
        return day is not None and any(
            hmac.compare_digest(given, _hash(key, tag, day, *parts)) for key in self._keys
        )

    def _check_old(self, found: re.Match[str], given: str, *parts: str) -> None:
        """Check the hash of an address in the old format. Raise SrsError if the hash is wrong, or OLD_FORM if
        the old format is not accepted.
        """
        if not self._accept_legacy:
            raise SrsError(SrsFault.WRONG_HASH if _is_new(found) else SrsFault.OLD_FORM)
        if len(given) < OLD_HASH_LENGTH or not given.isascii():
            raise SrsError(SrsFault.WRONG_HASH)
        given = given.lower()
        # ASCII letters in lower case, as libsrs2 hashes them, whatever the characters around them.
        hashed = "".join(parts).encode().lower()
        for key in self._keys:
            right = base64.b64encode(hmac.digest(key, hashed, "sha1")).decode().rstrip("=")
            if hmac.compare_digest(given, right[: len(given)].lower()):
                return
        raise SrsError(SrsFault.WRONG_HASH)

    def _check_day(self, day: int | None, today: int) -> None:
        if day is None or today - day > self._max_days:
            raise SrsError(SrsFault.EXPIRED)


def _is_new(found: re.Match[str]) -> bool:
    """Return whether the address is in the new format, in which SRS1 has the day before the hash."""
    return (_NEW_SRS0 if found.re is _SRS0 else _NEW_SRS1).fullmatch(found[1]) is not None


def _hash(key: bytes, *parts: str | int) -> str:
    """Return the hash of the parts of an SRS address, ignoring the case of ASCII letters."""
    octets = [str(part).encode().lower() for part in parts]
    mac = hmac.digest(key, b"".join(b"%d:%b" % (len(part), part) for part in octets), "sha256")
    return base64.b32encode(mac)[:HASH_LENGTH].decode()


def _stamp(day: int) -> str:
    return _BASE32[day % DAYS // 32] + _BASE32[day % 32]


def _day(stamp: str, today: int) -> int | None:
    """Return the latest day, up to tomorrow, that an SRS time stamp can mean, or `None` if it is invalid."""
    stamp = stamp.upper()
    if not _STAMP.fullmatch(stamp):
        return None
    shown = _BASE32.index(stamp[0]) * 32 + _BASE32.index(stamp[1])
    return today + 1 - (today + 1 - shown) % DAYS


def _unquoted(local: str) -> str:
    return _ESCAPED.sub(r"\1", local[1:-1]) if local.startswith('"') else local


def _mailbox(local: str, domain: str) -> Mailbox:
    if not _NEEDS_NO_QUOTES.fullmatch(local):
        local = '"' + _SPECIAL.sub(r"\\\1", local) + '"'
    text = f"<{local}@{domain}>"
    try:
        mailbox, rest = reverse_path(text)
    except CommandError as error:
        too_long = isinstance(error, PathTooLongError)
        raise SrsError(SrsFault.TOO_LONG if too_long else SrsFault.MALFORMED) from error
    if rest:
        raise SrsError(SrsFault.MALFORMED)
    return mailbox
