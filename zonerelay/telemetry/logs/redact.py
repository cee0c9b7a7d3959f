"""Replaces personal data in logs and traces with pseudonyms.

    alice@example.com        u-mfrggzdfmztwq@d-nbswy3dpeb3w6
    a client's IP address    c-orugs4zanfzsa
    a login name             as it is, unless it is an address

A pseudonym is a keyed BLAKE2 hash (65 bits in base 32): the same mailbox always has the same one, so log
lines join, and a list of guesses is useless without the key. The `d-` part depends on the domain alone, so
lines join by domain; the `u-` part depends on the whole mailbox, so that `info@` at two domains does not give
itself away by its frequency. Both ignore case: replies often change it. IP addresses and host names of peers
stay as they are; they belong to servers, not to users.

`text` is for untrusted text: addresses and Message-IDs in it become the same pseudonyms, control characters
become visible ones, and it is cut. It is idempotent. Nothing here raises, except `load_or_create_key`, as a
message.
"""

import contextlib
import fnmatch
import hashlib
import ipaddress
import re
import secrets
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import msgspec

from zonerelay import durable
from zonerelay.model.bounded import BoundedDict
from zonerelay.model.envelope import Mailbox, is_message_id

KEY_SIZE = 32
TEXT_LIMIT = 512
CACHE_SIZE = 8192

# More than TEXT_LIMIT is searched, because a long address shrinks to a short pseudonym.
_SEARCHED = 4 * TEXT_LIMIT

_BASE32 = "abcdefghijklmnopqrstuvwxyz234567"
_PAIRS = tuple(first + second for first in _BASE32 for second in _BASE32)
_SYLLABLES = "[a-z2-7]{13}"
_PSEUDONYM = re.compile(f"u-{_SYLLABLES}@d-{_SYLLABLES}")
# Context of an address: what already marks it, or the angle brackets of a path.
_MARKED = re.compile(rf"<(?:redacted:)?({_PSEUDONYM.pattern})>|(?<![\w-])({_PSEUDONYM.pattern})(?![\w-])")

# What may stand in a local part. Wider than RFC 5321: a stranger's text is not a grammar, and one
# character too many only costs a join, while one too few shows part of an address.
_LOCAL = r"[^\s<>()\[\],;:\"@\\\x00-\x1f\x7f␀-␡�]"
# The look-behind lets the search start only at the head of a run, and apostrophes before an address are not
# tried as a part of it as well, which keeps it linear.
_ADDRESS = re.compile(
    rf"""(?:(?<!{_LOCAL})((?:'(?={_LOCAL}))*+)({_LOCAL}+)|("(?:[^"\\]++|\\.)*+"))"""
    r"""(@|%40|\+40|\\x\{40\})(\[[^\]\s]*\]?|\w[\w.-]*\w|\w)""",
    re.DOTALL,
)
# RFC 3461 4, RFC 6533 3: what stands for a character in ORCPT.
_XTEXT = re.compile(r"\+([0-9A-F]{2})|\\x\{([0-9A-F]{2,6})\}")
# "user jane.doe unknown at person.example": what looks like no other word (with a dot, a digit, an
# underscore) between one for a mailbox and one for what is wrong with it.
_SPOKEN = re.compile(
    r"""\b((?:user|mailbox|account|recipient|address):?\ +)
    (?!u-[a-z2-7]{13}\b)((?=[^\s<>@]*[._\d])(?=[^\s<>@]*[^\W\d_])[^\s<>@:;,"']{2,64})
    (\ +(?:is\ +|was\ +)?(?:unknown|not|does|doesn't|disabled|invalid|rejected|unavailable|over|has)\b)
    (?:(\ +(?:at|in|on)\ +)(\w[\w-]*(?:\.\w[\w-]*)+))?""",
    re.IGNORECASE | re.VERBOSE,
)

_JOINS_BEFORE = re.compile(rf"{_LOCAL}|@")
_JOINS_AFTER = re.compile(r"[.-]*\w")

# Control characters become their visible pictures (U+2400…): one character stays one character.
_PICTURES = {code: 0x2400 + code for code in range(32)} | {0x7F: 0x2421}


class RedactKeyError(Exception):
    """The pseudonym key cannot be read or created; the message says what to do."""


class _PseudonymCache(BoundedDict[Mailbox, str]):
    """A cache of the pseudonyms of the last `CACHE_SIZE` addresses. It is thread-safe."""

    def __init__(self, make: Callable[[Mailbox], str]) -> None:
        super().__init__(CACHE_SIZE)
        self._make, self._lock = make, threading.Lock()

    def __missing__(self, mailbox: Mailbox) -> str:
        name = self._make(mailbox)
        with self._lock:
            self[mailbox] = name
        return name

    def known(self) -> list[tuple[Mailbox, str]]:
        with self._lock:
            return list(self.items())


class Redactor:
    """Replaces addresses with pseudonyms, which are made with one key. If it is disabled, addresses stay, but
    texts are still made printable.
    """

    def __init__(self, key: bytes, *, enabled: bool) -> None:
        key = key[: hashlib.blake2b.MAX_KEY_SIZE]
        # Hash objects that have processed the key already; they are copied for each value.
        self._keyed = {
            kind: hashlib.blake2b(key=key, digest_size=9, person=kind) for kind in (b"u", b"d", b"c")
        }
        self.enabled = enabled
        self.problem = ""
        """Why the key is not the one that the configuration names."""
        self._names = _PseudonymCache(self._hash_mailbox)
        self._domain = lru_cache(CACHE_SIZE)(lambda domain: f"d-{self._token(b'd', domain.rstrip('.'))}")
        self.mailbox: Callable[[Mailbox], str] = self._shown
        self.client: Callable[[str], str] = printable
        if enabled:
            self.mailbox = self._names.__getitem__
            self.client = lru_cache(CACHE_SIZE)(self._hash_client)

    def user(self, name: str) -> str:
        """Return the name of a local user, or a pseudonym if the name is an address."""
        return self.mailbox(Mailbox(name)) if "@" in name else printable(name)

    def text(self, text: str, *, limit: int = TEXT_LIMIT) -> str:
        """Make untrusted text safe for the log: without addresses, on one line, printable, at most `limit`
        characters.
        """
        if len(text) > _SEARCHED:
            text = _cut_between_words(text, _SEARCHED)
        if self.enabled:
            if "@" in text or "%40" in text or "+40" in text or "{40}" in text:
                text = _ADDRESS.sub(self._replace, text)
            if text[:1] != "2":  # the most frequent text: a positive reply
                text = _SPOKEN.sub(self._replace_spoken, text)
        if not text.isprintable():
            text = printable(text)
        return text if len(text) <= limit else _cut_outside_pseudonyms(text, limit)

    def about(self, text: str, mailbox: Mailbox) -> str:
        """Redact a peer's text about an address, including the address's local part alone and its domain
        alone.
        """
        return next(self.about_each(text, (mailbox,)))

    def about_each(self, text: str, mailboxes: Iterable[Mailbox]) -> Iterator[str]:
        """Yield the text for each of these addresses, redacted as by `about`. Most texts contain none of
        them, and are redacted once.
        """
        general, lower = self.text(text), text.lower()
        for mailbox in mailboxes:
            local, _, domain = mailbox.rpartition("@")
            if not self.enabled or not _stands_alone(local.lower(), lower):
                yield general
                continue
            name, _, there = self.mailbox(mailbox).partition("@")
            cleaned = _replace_word(text, local, name)
            yield self.text(text if cleaned == text else _replace_word(cleaned, domain, there))

    def always(self) -> "Redactor":
        """Return an enabled redactor with the same pseudonyms, for texts that are stored."""
        if self.enabled:
            return self
        other = Redactor(b"", enabled=True)
        other._keyed = self._keyed
        return other

    def stored(self, text: str) -> str:
        """Mark the pseudonyms in a redacted text for storage: `<redacted:u-…@d-…>`. Repeated calls have no
        effect.
        """
        return _MARKED.sub(lambda found: f"<redacted:{found[1] or found[2]}>", text)

    def message_id(self, field: str) -> str:
        """Return the pseudonym of a Message-ID, which is the same when a reply quotes it as an address."""
        value = field.strip().strip("<>")
        # Each one occurs once or twice, so it must not push mailboxes out of the cache.
        return self._hash_mailbox(Mailbox(value)) if self.enabled else printable(value)

    @property
    def fingerprint(self) -> str:
        """An identifier of the pseudonym key from which the key cannot be derived."""
        return self._token(b"d", "") if self.enabled else ""

    def matches(self, pseudonyms: Collection[str], mailbox: Mailbox) -> bool:
        """Return whether one of the pseudonyms belongs to the address, or to its domain alone."""
        written = self._hash_mailbox(mailbox)
        return written in pseudonyms or written.rpartition("@")[2] in pseudonyms

    def known(self, pseudonyms: Collection[str]) -> list[Mailbox]:
        """Return the addresses that are still in memory and have one of these pseudonyms, or domain
        pseudonyms.
        """
        return [
            each
            for each, name in self._names.known()
            if name in pseudonyms or name.rpartition("@")[2] in pseudonyms
        ]

    def clear(self, texts: Iterable[str]) -> Callable[[str], str]:
        """Return a function that replaces pseudonyms in a text by addresses that are still in memory."""
        names = {name for text in texts for name in _PSEUDONYM.findall(text)}
        known = {self.mailbox(each): each for each in self.known(names)} if names else {}
        return lambda text: _PSEUDONYM.sub(lambda found: known.get(found[0], found[0]), text)

    def _replace(self, match: re.Match[str]) -> str:
        lead, plain, quoted, sign, domain = match.groups("")
        local = plain or quoted
        found = f"{local if sign == '@' else _XTEXT.sub(_decoded, local)}@{domain}"
        if not _PSEUDONYM.fullmatch(found):
            found = self.mailbox(Mailbox(found))
        # What stands around must not look like a part of the pseudonym the next time.
        before = match.string[max(match.start() - 1, 0) : match.start()]
        gap = " " if _JOINS_BEFORE.fullmatch(before) else ""
        return gap + lead + (f"{found} " if _JOINS_AFTER.match(match.string, match.end()) else found)

    def _replace_spoken(self, match: re.Match[str]) -> str:
        before, local, between, at, domain = match.groups("")
        if not domain:
            return f"{before}{self._user(local.lower())}{between}"
        user, _, there = self.mailbox(Mailbox(f"{local}@{domain}")).partition("@")
        return f"{before}{user}{between}{at}{there}"

    def _shown(self, mailbox: Mailbox) -> str:
        return printable(mailbox) if mailbox else "<>"

    def _hash_mailbox(self, mailbox: Mailbox) -> str:
        if not mailbox:
            return "<>"
        whole = mailbox.lower()
        local, at, domain = whole.rpartition("@")
        return f"u-{self._token(b'u', whole)}@{self._domain(domain)}" if at and local else self._user(whole)

    def _user(self, name: str) -> str:
        return f"u-{self._token(b'u', name)}"

    def _hash_client(self, address: str) -> str:
        return f"c-{self._token(b'c', address.lower().removeprefix('::ffff:'))}" if address else ""

    def _token(self, kind: bytes, value: str) -> str:
        hashed = self._keyed[kind].copy()
        hashed.update(value.encode("utf-8", "surrogatepass"))
        # The first 65 of 72 bits, as base64.b32encode would write them, in less time.
        bits = int.from_bytes(hashed.digest(), "big") >> 7
        pairs = [_PAIRS[(bits >> shift) & 1023] for shift in (55, 45, 35, 25, 15, 5)]
        return "".join(pairs) + _BASE32[bits & 31]


def _decoded(match: re.Match[str]) -> str:
    code = int(match[1] or match[2], 16)
    return chr(code) if code <= sys.maxunicode else match[0]


def _stands_alone(word: str, text: str) -> bool:
    """Return whether a text contains this word with no letter or digit next to it. No pattern is used,
    because this is called often.
    """
    at = text.find(word) if word else -1
    while at >= 0:
        end = at + len(word)
        if not (text[at - 1 : at].isalnum() or text[end : end + 1].isalnum()):
            return True
        at = text.find(word, at + 1)
    return False


def _replace_word(text: str, word: str, by: str) -> str:
    """Replace a word that has no letter or digit next to it, ignoring case but not changing addresses."""
    pattern = rf"(?<![\w@.%+-]){re.escape(word)}(?![\w@%+-]|\.\w)"
    return re.sub(pattern, by, text, flags=re.IGNORECASE)


def printable(text: str) -> str:
    """Return the text on one line, without control, bidirectional or invalid characters."""
    if text.isprintable():
        return text
    text = text.translate(_PICTURES)
    return "".join(c if c.isprintable() else "�" for c in text)


def _cut_between_words(text: str, limit: int) -> str:
    """Cut the text after a blank, because a part of an address would not be recognized and redacted."""
    head = text[:limit]
    return head[: head.rfind(" ") + 1] + "…"


def _cut_outside_pseudonyms(text: str, limit: int) -> str:
    end = limit - 1
    for match in _PSEUDONYM.finditer(text):
        if match.start() < end < match.end():
            end = match.start()
    return text[:end] + "…"


def load_key(path: Path) -> bytes | None:
    """Return the pseudonym key at `path`, or `None` if it does not exist."""
    try:
        return _read_key(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RedactKeyError(f"cannot read the log redaction key {path}: {error.strerror}") from error


def load_or_create_key(path: Path) -> bytes:
    """Return the pseudonym key at `path`, and create it (mode 0600) if it does not exist. Several workers may
    call this at the same time.
    """
    if (key := load_key(path)) is not None:
        return key
    try:
        # If another worker was first, its key is used.
        durable.create(path, f"{secrets.token_hex(KEY_SIZE)}\n".encode("ascii"))
        return _read_key(path)
    except OSError as error:
        raise RedactKeyError(
            f"cannot create the log redaction key {path}: {error.strerror}; create the directory, or set "
            "log.redact_key_file to another file"
        ) from error


def _read_key(path: Path) -> bytes:
    if path.stat().st_mode & 0o004:
        raise RedactKeyError(
            f"the log redaction key {path} is readable by all users, who could guess the pseudonyms; run "
            "chmod 640"
        )
    key = b""
    with contextlib.suppress(ValueError):
        key = bytes.fromhex(path.read_text("ascii"))
    if len(key) < KEY_SIZE:
        raise RedactKeyError(
            f"the log redaction key {path} is damaged (expected {2 * KEY_SIZE} hexadecimal digits); remove "
            "it to create a new one, which changes all pseudonyms"
        )
    return key


# The forms in which a log or a history may have an address, a client or a domain that is asked for.

_PSEUDONYM_address_forms = re.compile(r"[uc]-[a-z2-7]{13}(@d-[a-z2-7]{13})?")
_DOMAIN = re.compile(r"d-[a-z2-7]{13}")


class UnsearchableError(Exception):
    """No search can find this value; the message has the reason."""


class SearchForms(msgspec.Struct, frozen=True):
    """All forms in which the history or the log may contain a searched value."""

    exact: frozenset[str] = frozenset()
    ends: tuple[str, ...] = ()
    pattern: str = ""

    def matches(self, text: str) -> bool:
        lower = text.lower()
        return bool(
            lower in self.exact
            or (self.ends and lower.endswith(self.ends))
            or (self.pattern and fnmatch.fnmatchcase(lower, self.pattern))
        )


def form_of(
    text: str,
    redactor: Redactor | None,
    *,
    clear: bool,
    place: str = "the history",
    way_out: str = '[history] addresses = "clear" stores addresses',
) -> SearchForms:
    """Return the forms in which a searched address, client, user, Message-ID, message id or domain
    (`@example.com`) may be stored. `redactor` is `None` without a key. With `clear`, addresses are stored
    unredacted in `place`. Raise UnsearchableError if the value cannot be found.
    """
    with contextlib.suppress(ValueError):
        text = str(ipaddress.ip_address(text))
    lower = text.strip().lower()
    lower = "<>" if lower == "<>" else lower.strip("<>")
    if _PSEUDONYM_address_forms.fullmatch(lower) or is_message_id(lower):
        return SearchForms(frozenset({lower}))
    if _DOMAIN.fullmatch(lower):
        return SearchForms(ends=(f"@{lower}",))
    domain = lower.removeprefix("*")
    if domain.startswith("@") and "*" not in domain:
        hashed = () if redactor is None else (redactor.mailbox(Mailbox(f"x{domain}")).partition("@")[2],)
        return SearchForms(ends=(domain, *(f"@{each}" for each in hashed)))
    if "*" in lower:
        if clear:
            return SearchForms(pattern=lower)
        raise UnsearchableError(
            f"{text}: {place} contains pseudonyms of complete addresses, so parts of an address cannot be "
            f"searched for. Specify a complete address, or a domain as @example.com; {way_out}"
        )
    if redactor is None or not lower:
        return SearchForms(frozenset({lower}))
    return SearchForms(frozenset({lower, redactor.mailbox(Mailbox(lower)), redactor.client(lower)}))
