"""Parses option values with a syntax of their own: domains, addresses, header fields, replies, keys and
dates.

Each reader receives one line of text, which is not empty. It raises ValueError with a text that explains what
to write instead.
"""

import datetime
import ipaddress
import re
from collections.abc import Callable, Mapping
from urllib.parse import SplitResult, urlsplit

from zonerelay.config import endpoints
from zonerelay.config.problems import quoted, unusable

_FINGERPRINT = re.compile(r"[0-9A-Fa-f]{64}")
_HEADER = re.compile(r"[!-9;-~]+(?::.*)?", re.ASCII)  # RFC 5322 2.2: a field name is printable ASCII but ":"
_PATTERN = re.compile(r"[^\s<>@]*@[^\s<>@]+|<>", re.ASCII)
_STATUS = r"[0-9]{1,3}\.[0-9]{1,3}"
# A status of another class than the code's (RFC 3463 2), or a status without a text, is not a valid text.
_REPLY = re.compile(rf"([45])[0-9][0-9] (?:\1\.{_STATUS} )?(?![245]\.{_STATUS}(?: |$))[!-~][ -~]*", re.ASCII)

MAX_REPLY = 400  # RFC 5321 4.5.3.1.5 limits a reply line to 512 bytes


def line(text: str) -> str:
    """Return the text unchanged, because any single line is valid."""
    return text


def _matching(pattern: re.Pattern[str], expected: str) -> Callable[[str], str]:
    """Return a function that accepts only texts that match a regular expression. For others the error is the
    text, followed by `expected`.
    """

    def read(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(f"{quoted(text)} {expected}")
        return text

    return read


name = _matching(
    re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII),
    "is not a name; expected 1 to 64 letters, digits, dots, dashes and underscores",
)
function = _matching(
    re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*"),
    'is not a function or class; expected "module:name", such as "mypolicy:Mine" or "myretry:backoff"',
)
header = _matching(_HEADER, 'is not a header condition; expected "Name" or "Name: part of its value"')
selector = _matching(
    re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*", re.ASCII),
    'is not a selector; expected the part before "._domainkey", such as "s2026"',
)
replacement = _matching(
    re.compile(r"[^\s<>@,;]*@[^\s<>@,;]+"), 'is not an address; expected "user@example.com" or "@example.com"'
)
schema = _matching(
    re.compile("[a-z_][a-z0-9_]{0,39}"),
    "must consist of lower-case letters, digits and _ (at most 40 characters), such as zonerelay",
)
sql_name = _matching(
    re.compile("[A-Za-z_][A-Za-z0-9_]{0,39}"), "must consist of letters, digits and _ (at most 40 characters)"
)
key_prefix = _matching(re.compile("[!-~]+"), "must consist of printable ASCII characters without spaces")
bucket = _matching(
    re.compile("[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"),
    "is not a bucket name; expected 3 to 63 lower-case letters, digits, dots and hyphens",
)
object_prefix = _matching(
    re.compile(r"(?!.{201})(?:[A-Za-z0-9!_.*'()-]+/)+"),
    "must be ASCII of at most 200 characters and end with a slash, such as zonerelay/",
)
time_of_day = _matching(
    re.compile(r"([01]\d|2[0-3]):[0-5]\d", re.ASCII), 'is not a time of day, such as "06:00"'
)
address = _matching(re.compile(r"[^\s<>@]+@[^\s<>@]+"), 'is not an address such as "postmaster@example.com"')


def ehlo_name(text: str) -> str:
    if not endpoints.is_ehlo_name(text):
        raise unusable(text, "a host name", 'a full name such as "relay.example.org", or "[192.0.2.1]"')
    return text


def listen(text: str) -> str:
    return str(endpoints.parse_listen(text))


def name_server(text: str) -> str:
    endpoints.parse_name_server(text)
    return text


def network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    example = 'expected "192.0.2.0/24", "192.0.2.7" or "2001:db8::/32"'
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"{quoted(text)} is not a network: {example}") from None
    if "/" in text and network.network_address != ipaddress.ip_address(text.partition("/")[0]):
        address = text.partition("/")[0]
        raise ValueError(f'{quoted(text)} has host bits set; write "{network}" or "{address}"')
    if isinstance(network, ipaddress.IPv6Network) and network.network_address.ipv4_mapped is not None:
        raise ValueError(f"{quoted(text)} is an IPv4-mapped IPv6 address; {example}")
    return network


def fingerprint(text: str) -> str:
    """Convert a certificate fingerprint to 64 hexadecimal digits in lower case."""
    digits = text.lower().removeprefix("sha256 fingerprint=").removeprefix("sha256:").replace(":", "")
    if not _FINGERPRINT.fullmatch(digits):
        digits = "64 hexadecimal digits, as printed by openssl x509 -noout -fingerprint -sha256"
        raise unusable(text, "a SHA-256 fingerprint", digits)
    return digits


def domain(text: str) -> str:
    """Check a domain pattern such as `example.com`, `*.example.com` or `*`. The router converts non-ASCII
    names.
    """
    text = text.lower()
    name = text.removeprefix("*.")
    if "@" in text:
        domain = quoted(text.rpartition("@")[2])
        raise ValueError(f"{quoted(text)} is an address; expected only its domain, {domain}")
    if text != "*" and name.isascii() and not endpoints.is_ehlo_name(name):
        raise ValueError(_no_domain(text))
    return text


def _no_domain(text: str) -> str:
    try:
        literal = endpoints.address_literal(ipaddress.ip_address(text))
    except ValueError:
        return f'{quoted(text)} is not a domain; expected "example.com" or "*.example.com"'
    return f"{quoted(text)} is not a domain; write an address in brackets, {quoted(literal)}"


def address_pattern(text: str) -> str:
    if "@" not in text and text != "<>":
        return domain(text)
    if not _PATTERN.fullmatch(text):
        patterns = '"user@example.com", "example.com", "*.example.com", "bounce-*@example.com" or "<>"'
        raise unusable(text, "an address pattern", patterns)
    return text


def reply(text: str) -> str:
    if len(text) > MAX_REPLY:
        raise ValueError(f"a reply may have at most {MAX_REPLY} characters, but this one has {len(text)}")
    if not _REPLY.fullmatch(text):
        example = 'such as "550 5.7.1 Ask postmaster@example.org"'
        raise unusable(text, "an error reply", f"a code, a matching status and an ASCII text, {example}")
    return text


MAX_FIELD = 998  # RFC 5322 2.1.1

_REFERENCE = re.compile(r"(?:env|credential):[A-Za-z0-9._-]+", re.ASCII)
_FIELD = re.compile(r"([!-9;-~]{1,70}):[ \t]*([!-~][\t -~]*)")  # its value is sent unchanged


def ip_address(text: str) -> str:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise unusable(text, "an address", 'an IP address such as "192.0.2.7" or "2001:db8::7"') from None
    if address.is_unspecified or address.is_multicast:
        raise ValueError(f"{quoted(text)} cannot be used as a source address")
    return str(address)


def next_hops(text: str) -> str:
    for hop in endpoints.split_next_hops(text):
        endpoints.parse_next_hop(hop)
    return text


def secret(text: str) -> str:
    """Check a reference to a secret (see `secrets.read_secret`)."""
    if text and not (text.startswith("/") or _REFERENCE.fullmatch(text)):
        # It may be the secret itself, so it is not repeated.
        place = 'a file ("/etc/zonerelay/name.secret"), "env:NAME" or "credential:NAME"'
        raise ValueError(f"must refer to the secret instead of containing it: {place}")
    return text


def _parts(text: str) -> SplitResult:
    """Split a URL into its parts. Raise ValueError without the text, which may contain a secret."""
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018 - it raises what is wrong with it
    except ValueError:
        raise ValueError('is not a URL; expected a host and a port as in "https://HOST:PORT"') from None
    return parts


def any_url(text: str) -> str:
    _parts(text)
    return text


def url(text: str) -> str:
    parts = _parts(text)
    loopback = parts.hostname in {"127.0.0.1", "::1", "localhost"}
    if not parts.hostname or parts.scheme not in ({"https", "http"} if loopback else {"https"}):
        raise ValueError(f'{quoted(text)} is not a secure URL; expected "https://…"')
    if "@" in parts.netloc:
        raise ValueError("contains a user name or password; use client_id and client_secret instead")
    return text


def service_url(text: str) -> str:
    """Check the URL of a service whose credentials are in other options."""
    parts = _parts(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("must begin with https:// (or http://) and contain a host")
    if "@" in text or parts.query or parts.fragment:
        raise ValueError("must contain only the address; use access_key and secret_key for the credentials")
    return text


_FIELD_NAME = re.compile(r"[!-9;-~]{1,70}", re.ASCII)


def _field_name(refused: Mapping[str, str], *, starts: str = "") -> Callable[[str], str]:
    """Return a function that checks the name of a header field. `refused` are reasons, by names in lower
    case; `starts` is the reason for names that begin as the fields of a group do.
    """

    def read(text: str) -> str:
        name = text.lower()
        if not _FIELD_NAME.fullmatch(text):
            raise ValueError(f'{quoted(text)} is not a header field name; expected a name such as "X-Mailer"')
        if why := refused.get(name) or (starts if name.startswith(_GROUPS) else ""):
            raise ValueError(f"{quoted(text)} {why}")
        return text

    return read


_NEEDED = 'is required in mail, and the zone header is removed; use a name such as "X-Sending-Zone"'
_GROUPS = ("resent-", "content-", "list-", "arc-")
zone_field = _field_name(
    dict.fromkeys(
        (  # RFC 5322 3.6, and fields of signatures and authentication
            *("from", "sender", "reply-to", "to", "cc", "bcc", "subject", "date", "comments", "keywords"),
            *("message-id", "in-reply-to", "references", "received", "return-path", "delivered-to"),
            *("mime-version", "authentication-results", "dkim-signature"),
        ),
        _NEEDED,
    ),
    starts=_NEEDED,
)
"""The name of a field that the relay may remove from messages, because mail does not need it."""
removed_field = _field_name(
    dict.fromkeys(
        ("received", "dkim-signature", "from", "date", "return-path"),
        "cannot be changed by a rule, because the relay or a standard requires it",
    )
)
dropped_field = _field_name(
    {
        "received": "cannot be dropped: it is required to stop mail loops (RFC 5321 6.3)",
        "from": "cannot be dropped: every message must have it (RFC 5322 3.6)",
    }
)
"""The name of a field that a listener takes out of every message."""


def new_field(text: str) -> str:
    """Check a header field of the form `Name: value`."""
    found = _FIELD.fullmatch(text)
    if not found or len(text) > MAX_FIELD:
        raise ValueError(f'{quoted(text)} is not a header field; expected "Name: value" in ASCII on one line')
    removed_field(found[1])
    return text


def date_text(when: float) -> str:
    """Format a Unix time as it is written in the configuration file (ISO 8601, UTC)."""
    return datetime.datetime.fromtimestamp(when, datetime.UTC).isoformat() if when else '""'
