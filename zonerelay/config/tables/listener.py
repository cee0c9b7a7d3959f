"""[[listener]]: the addresses that accept mail. The checks ensure that no listener is an open relay, that TLS
can work, and that no password is sent unencrypted.

The checks here do not test whether files exist and are usable: `check-config` and the start do.
"""

import enum
import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from zonerelay.config.endpoints import parse_listen
from zonerelay.config.options import forms
from zonerelay.config.options import options as declare
from zonerelay.config.options.options import DAY, KB, MB, MINUTE
from zonerelay.config.problems import Findings, in_words, quoted
from zonerelay.model.envelope import Priority

# [sendmail]: the files of sendmail(1) on this machine.

# As in `zonerelay/sendmail.py`, which a test compares: a relay loads that with the first mail of sendmail(1).
DROP, ALIASES = "/var/spool/zonerelay", "/etc/aliases"


@dataclass(frozen=True, slots=True, kw_only=True)
class SendmailSettings:
    """The paths of the files that sendmail(1) uses on this machine (docs/send/applications.md)."""

    drop: Path = declare.path(Path(DROP))
    """The directory in which sendmail stores a message while the relay does not respond, for the relay to
    submit. It has the directories tmp and new, owned by the relay's user, with mode 3733. Without them,
    sendmail fails with status 75.
    """
    aliases: Path = declare.path(Path(ALIASES))
    """Addresses for the users of this machine, as in "root: admin@example.com", read for each message."""


Network = ipaddress.IPv4Network | ipaddress.IPv6Network
# Networks with a shorter prefix are a large part of the Internet, not the network of one owner. Networks that
# together cover everything (0.0.0.0/1 and 128.0.0.0/1) are merged before they are measured.
_OPEN_IPV4_PREFIX = 7
_OPEN_IPV6_PREFIX = 15
_LOCAL_IPV6 = (ipaddress.IPv6Network("fc00::/7"), ipaddress.IPv6Network("fe80::/10"))
SUBMISSIONS = 465
STARTS_IN_CLEAR = (25, 587)


class ListenerTls(enum.StrEnum):
    """The TLS mode of a listener."""

    NONE = "none"
    STARTTLS = "starttls"
    IMPLICIT = "implicit"


class ListenerProtocol(enum.StrEnum):
    """The protocol of a listener."""

    SMTP = "smtp"
    HTTP = "http"


class ListenerAuth(enum.StrEnum):
    """Whether a listener requires authentication."""

    OFF = "off"
    OPTIONAL = "optional"
    REQUIRED = "required"


class BareLineEnds(enum.StrEnum):
    """The treatment of bare CR and LF in messages."""

    NORMALIZE = "normalize"
    REJECT = "reject"


class HeaderControls(enum.StrEnum):
    """The treatment of control characters in the header."""

    REJECT = "reject"
    REMOVE = "remove"


class Idempotency(enum.StrEnum):
    """Whether messages may or must have an idempotency key."""

    OFF = "off"
    MESSAGE_ID = "message-id"


class UnsafeListener(enum.StrEnum):
    """Unsafe settings of a listener that must be enabled explicitly."""

    OPEN_RELAY = "open-relay"
    CLEARTEXT_AUTH = "cleartext-auth"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerSettings:
    """An address at which mail is accepted (docs/send/listener.md). If the file has no [[listener]], there is
    one with these defaults.
    """

    address: str = declare.text("127.0.0.1:2525", form=forms.listen)
    """The address to listen on: "127.0.0.1:2525", "[::]:25" (every address), "unix:/run/zonerelay/smtp.sock".
    """
    protocol: ListenerProtocol = declare.choice(ListenerProtocol.SMTP)
    """http: applications submit mail with POST /v1/messages and a token (docs/send/http.md). It requires auth
    = "required", and tls must be none or implicit.
    """
    tls: ListenerTls = declare.choice(ListenerTls.NONE)
    """none; starttls: offered in EHLO (ports 25 and 587); implicit: from the first byte (port 465). Both
    require a certificate, such as one of zonerelay cert self-signed.
    """
    certificate: tuple[Path, ...] = declare.paths()
    """One PEM file, or several, each a certificate with its chain, such as certbot's fullchain.pem. The name
    that the client requests (SNI) selects one, the first by default. Changed files are read again.
    """
    key: tuple[Path, ...] = declare.paths()
    """The private keys, one PEM file for each certificate, in the same order. Empty: they are in the
    certificate files.
    """
    require_tls: bool = declare.switch(False)
    """With starttls: only EHLO, STARTTLS, NOOP, RSET and QUIT are accepted unencrypted; everything else gets
    530 5.7.0.
    """
    auth: ListenerAuth = declare.choice(ListenerAuth.OFF)
    """SMTP AUTH (PLAIN, LOGIN), over TLS only, for the users of [auth], who may relay from anywhere.
    optional: allow_networks may relay without it. required: clients must log in, or have a certificate of
    allow_certificates.
    """
    max_auth_failures: int = declare.count(3, most=100)
    """Failed logins in one connection before it is closed with 421."""
    allow_networks: tuple[Network, ...] = declare.networks(
        (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
    )
    """Clients that may relay without a login. All others are refused (550 5.7.1), unless auth or
    allow_certificates permits them.
    """
    allow_certificates: tuple[str, ...] = declare.texts((), form=forms.fingerprint)
    """SHA-256 fingerprints of client certificates that may relay, as openssl x509 -noout -fingerprint -sha256
    prints them. A missing or unlisted certificate changes nothing.
    """
    unsafe: tuple[UnsafeListener, ...] = declare.choices(UnsafeListener)
    """open-relay: every client may relay; without it, allow_networks that cover (nearly) the whole Internet
    are refused. cleartext-auth: AUTH is also offered without TLS, for a network on which no other machine can
    listen.
    """
    proxy_networks: tuple[Network, ...] = declare.networks(())
    """Load balancers whose connections must begin with a PROXY header (version 1 or 2); from any other
    address, the header ends the session. Permissions depend on the client that it names, never on the
    balancer.
    """
    xclient_networks: tuple[Network, ...] = declare.networks(())
    """Servers in front of this one, such as nginx, that may name the client and its user with XCLIENT, and
    over HTTP the client with X-Forwarded-For. Trust them as the relay itself.
    """
    lenient_paths: bool = declare.switch(True)
    """Accept addresses of clients that may relay as some devices write them in MAIL and RCPT: <Backup
    <backup@example.org>>, < backup@example.org >, backup@example.org, <backup@example.org.>.
    """
    check_sender_domain: bool = declare.switch(False)
    """Look up the sender's domain at MAIL: 550 5.7.27 if it accepts no mail (null MX), 550 5.1.8 if it does
    not exist, 451 4.4.3 if DNS does not answer.
    """
    policy: str = declare.text("", form=forms.function)
    """A policy in Python, "module:Class", called at every step, or a handler of aiosmtpd
    (docs/send/policy.md).
    """
    policy_file: Path | None = declare.optional_path(needs="policy")
    """A file for the policy, which decides what it contains."""
    policy_timeout: float = declare.duration(5.0, most=5 * MINUTE)
    """The time limit of the policy for each step; then the client gets 451."""
    policy_max_size: int = declare.size(10 * MB)
    """The largest message for a handler of aiosmtpd with handle_DATA, which takes twice its size of
    max_session_memory.
    """
    authenticator: str = declare.text("", form=forms.function)
    """An authenticator of aiosmtpd, "module:callable", that checks logins instead of the users of [auth]
    (docs/send/policy.md).
    """
    priority: Priority = declare.choice(Priority.NORMAL)
    """The priority of mail accepted here, unless the user or a route sets another: high, normal or bulk
    (docs/deliver/routing.md).
    """
    drop_headers: tuple[str, ...] = declare.texts(
        ("Bcc", "Resent-Bcc", "Return-Path", "Content-Length"), form=forms.dropped_field
    )
    """Header fields that are removed from every message (docs/deliver/rewriting.md)."""
    zone_header: str = declare.text("", form=forms.zone_field)
    """A header field, such as "X-Sending-Zone", in which trusted clients name the zone of their mail, instead
    of the routes (docs/deliver/routing.md). It is removed from every message, also from other clients. Empty:
    none.
    """
    zone_header_users: tuple[str, ...] = declare.texts((), needs="zone_header")
    """Users who may name zones; "*" is every user."""
    zone_header_networks: tuple[Network, ...] = declare.networks((), needs="zone_header")
    """Clients that may name zones, if they may relay."""
    hide_client: bool = declare.switch(False)
    """Leave the client's name and address out of the Received field, for submission by people. The log still
    has them.
    """
    bare_line_ends: BareLineEnds = declare.choice(BareLineEnds.NORMALIZE)
    """Bare CR or LF in a message, which can smuggle a second message past another server. normalize: bare LF
    becomes CRLF, bare CR a space. reject: 550 5.6.0.
    """
    header_controls: HeaderControls = declare.choice(HeaderControls.REJECT)
    """NUL in the header, or a control character in a field's name, which hides a field from most readers.
    reject: 550 5.6.0. remove: these characters are removed, as by Postfix's message_strip_characters.
    """
    idempotency: Idempotency = declare.choice(Idempotency.OFF)
    """message-id: a message with the Message-ID, sender and recipients of an earlier one of this client gets
    the first answer and is not sent again (docs/send/idempotency.md). off: only the field Idempotency-Key
    counts.
    """
    max_message_size: int = declare.size(50 * MB)
    """The maximum size of a message, announced in EHLO. It costs disk, not memory."""
    max_recipients: int = declare.count(1000, most=100_000)
    """Recipients per message; more get 452 4.5.3, and the client sends the message again for them. RFC 5321
    4.5.3.1.8 asks for at least 100.
    """
    max_connections: int = declare.count(1000)
    """Open connections on this listener; the next one gets 421."""
    max_connections_per_client: int = declare.count(50)
    """Open connections from one client (an IPv4 address, an IPv6 /64)."""
    max_connections_per_network: int = declare.count(200)
    """Open connections from one network (IPv4 /24, IPv6 /48)."""
    max_commands: int = declare.count(100_000, least=10, most=1_000_000_000)
    """Commands in one connection."""
    max_errors: int = declare.count(20)
    """Refused or unknown commands in one connection; then 421."""
    max_received: int = declare.count(100, least=10, most=1000)
    """Received fields in a message; more are a mail loop: 554 5.4.6. RFC 5321 6.3 asks for at least 100."""
    max_header_size: int = declare.size(256 * KB, least=4 * KB, most=16 * MB)
    """The maximum size of the header, which is held in memory."""
    idle_timeout: float = declare.duration(5 * MINUTE)
    """How long to wait for the client's next command or data; RFC 5321 4.5.3.2.7 asks for 5 minutes."""
    transaction_timeout: float = declare.duration(30 * MINUTE)
    """The time limit of one message, from MAIL to its last byte."""
    min_data_rate: int = declare.count(500, optional=True)
    """The minimum bytes per second of a message on average, once idle_timeout has passed; slower clients get
    421. 0: any rate.
    """
    max_hold: float = declare.duration(7 * DAY, least=1.0, most=30 * DAY, optional=True)
    """How far ahead clients that may relay can set the time of delivery (FUTURERELEASE, RFC 4865). 0: not
    offered.
    """


def _open_to_all(networks: Iterable[Network]) -> str:
    """Return the networks that are too wide for one owner as text, or ""; adjacent ones are merged."""
    listed = list(networks)
    ipv4 = ipaddress.collapse_addresses(each for each in listed if isinstance(each, ipaddress.IPv4Network))
    ipv6 = ipaddress.collapse_addresses(each for each in listed if isinstance(each, ipaddress.IPv6Network))
    wide: list[Network] = [each for each in ipv4 if each.prefixlen <= _OPEN_IPV4_PREFIX]
    far = (each for each in ipv6 if not any(map(each.subnet_of, _LOCAL_IPV6)))
    wide += [each for each in far if each.prefixlen <= _OPEN_IPV6_PREFIX]
    return in_words(map(str, wide)) if wide else ""


def listener_problems(listener: ListenerSettings, *, takes_reports: bool) -> Findings:
    """Yield the problems of a listener. With `takes_reports` ([srs] is used), a listener is useful even if no
    client may relay.
    """
    if UnsafeListener.OPEN_RELAY in listener.unsafe and listener.auth is ListenerAuth.REQUIRED:
        yield "unsafe", '"open-relay" has no effect with auth = "required"; remove one of them'
    yield from _relaying_problems(listener, takes_reports=takes_reports)
    yield from _trust_problems(listener)
    if listener.authenticator and listener.auth is ListenerAuth.OFF:
        yield "authenticator", 'has no effect with auth = "off"; set auth = "optional" or "required"', "auth"
    yield from _tls_problems(listener)
    if listener.protocol is ListenerProtocol.HTTP:
        yield from _http_problems(listener)


def _relaying_problems(listener: ListenerSettings, *, takes_reports: bool) -> Findings:
    wide = _open_to_all(listener.allow_networks)
    if wide and listener.auth is ListenerAuth.REQUIRED:
        yield "allow_networks", 'has no effect with auth = "required"; remove it'
    elif wide and UnsafeListener.OPEN_RELAY not in listener.unsafe:
        remedy = 'list only your own networks, or set unsafe = ["open-relay"]'
        yield "allow_networks", f"{wide} would make this an open relay; {remedy}"
    # Who can reach a Unix socket is decided by its directory, not by an address.
    anyone = takes_reports or listener.address.startswith("unix:") or listener.auth is not ListenerAuth.OFF
    listed = listener.allow_networks or listener.allow_certificates
    if not (anyone or listed or UnsafeListener.OPEN_RELAY in listener.unsafe):
        empty = 'is empty, so no client could relay; list a network, or set auth = "required"'
        yield "allow_networks", empty, "allow_networks", "allow_certificates", "auth"


def _trust_problems(listener: ListenerSettings) -> Findings:
    """Yield problems of lists of trusted proxies: networks so wide that any client could forge its address,
    and networks on a Unix socket.
    """
    is_unix, instead = listener.address.startswith("unix:"), 'an address, such as "127.0.0.1:2526"'
    no_address = "cannot be used on a Unix socket, whose clients have no address"
    for key in ("proxy_networks", "xclient_networks"):
        if wide := _open_to_all(getattr(listener, key)):
            yield key, f"{wide} would let every client forge its address; list only the proxies"
        elif is_unix and getattr(listener, key):
            yield key, f"{no_address}; let the proxies connect to {instead}"
    if is_unix and listener.zone_header_networks:
        let = f"use zone_header_users, or let these clients connect to {instead}"
        yield "zone_header_networks", f"{no_address}; {let}"


def _tls_problems(listener: ListenerSettings) -> Findings:
    certificates, keys = listener.certificate, listener.key
    if listener.tls is ListenerTls.NONE:
        for key in ("certificate", "key", "allow_certificates"):
            if getattr(listener, key):
                yield key, 'has no effect with tls = "none"; set tls = "starttls" or "implicit"', "tls", key
        if listener.require_tls:
            yield "require_tls", 'requires tls = "starttls" ("implicit" always uses TLS)', "tls"
    elif not certificates:
        needs = 'requires certificate = "FILE" and key = "FILE" (zonerelay cert self-signed creates both)'
        yield "tls", f'"{listener.tls}" {needs}', "certificate"
    if certificates and keys and len(keys) != len(certificates):
        number = f"must list a file for each certificate ({len(certificates)}), or none, not {len(keys)}"
        yield "key", number, "tls", "certificate", "key"
    for at, certificate in enumerate(certificates):
        if (first := certificates.index(certificate)) < at:
            already = f"{quoted(str(certificate))} is already certificate[{first}]; remove or correct it"
            yield ("certificate", at), already, "tls", "certificate", "key"
    is_unsafe = UnsafeListener.CLEARTEXT_AUTH in listener.unsafe
    if listener.protocol is ListenerProtocol.HTTP and parse_listen(listener.address).is_loopback:
        is_unsafe = True  # a proxy on this machine has the TLS
    if listener.auth is not ListenerAuth.OFF and listener.tls is ListenerTls.NONE and not is_unsafe:
        remedy = 'set tls, or set unsafe = ["cleartext-auth"]'
        yield "auth", f'"{listener.auth}" would accept passwords in clear text; {remedy}', "tls", "unsafe"


def _http_problems(listener: ListenerSettings) -> Findings:
    """Yield problems of settings that HTTP listeners do not support."""
    if listener.auth is not ListenerAuth.REQUIRED:
        yield "protocol", '"http" requires auth = "required", because each request has a token', "auth"
    if listener.tls is ListenerTls.STARTTLS:
        yield "tls", 'must be "none" or "implicit" with protocol = "http", which has no STARTTLS'
    for key in ("allow_certificates", "authenticator"):
        if getattr(listener, key):
            instead = "users authenticate with a token (zonerelay token add)"
            yield key, f'cannot be used with protocol = "http"; {instead}', key


def listener_advice(listener: ListenerSettings) -> Findings:
    yield from _port(listener)
    yield from _files(listener)
    yield from _log_in(listener)
    if UnsafeListener.OPEN_RELAY in listener.unsafe:
        yield "unsafe", f"every client that reaches {listener.address} may relay"
    usual = ListenerSettings().allow_networks
    if listener.auth is ListenerAuth.REQUIRED and listener.allow_networks not in (usual, ()):
        yield "allow_networks", 'has no effect with auth = "required"; users may log in from any address'
    yield from _servers_in_front(listener)
    if listener.zone_header and not (listener.zone_header_users or listener.zone_header_networks):
        remedy = "set zone_header_users or zone_header_networks"
        yield "zone_header", f"no client may select a zone with {listener.zone_header}; {remedy}"
    if listener.zone_header_users and listener.auth is ListenerAuth.OFF and not listener.xclient_networks:
        yield "zone_header_users", 'matches only mail submitted over HTTP: this listener has auth = "off"'
    if listener.hide_client:
        yield "hide_client", "true: the client of a message is recorded only in the log, under its message id"


def users_advice(user: tuple[str, ...], listeners: Sequence[ListenerSettings]) -> Findings:
    """Yield a warning about a rule with the condition `user` if no listener can authenticate users."""
    if user and all(each.auth is ListenerAuth.OFF and not each.xclient_networks for each in listeners):
        only = "matches only mail submitted over HTTP"
        yield "user", f'{only}, because no listener has auth = "optional" or "required"'


def _port(listener: ListenerSettings) -> Findings:
    port = parse_listen(listener.address).port
    if listener.tls is ListenerTls.IMPLICIT and port in STARTS_IN_CLEAR:
        remedy = f'set tls = "starttls", or use port {SUBMISSIONS}'
        yield "tls", f"implicit on port {port}: clients expect a clear-text greeting there; {remedy}"
    elif listener.tls is not ListenerTls.IMPLICIT and port == SUBMISSIONS:
        remedy = 'set tls = "implicit", or use port 587'
        yield "tls", f"{listener.tls} on port {SUBMISSIONS}: clients start TLS immediately there; {remedy}"


def _files(listener: ListenerSettings) -> Findings:
    policy_files = [listener.policy_file] if listener.policy_file is not None else []
    for key, files in (
        ("certificate", listener.certificate),
        ("key", listener.key),
        ("policy_file", policy_files),
    ):
        for file in files:
            if not file.is_absolute():
                yield key, in_full(file)
                break


def in_full(file: Path) -> str:
    """Return a warning about a relative path."""
    return f"{file} is relative to the directory in which the relay is started; use an absolute path"


def _log_in(listener: ListenerSettings) -> Findings:
    if listener.auth is ListenerAuth.OFF or listener.tls is ListenerTls.IMPLICIT or listener.require_tls:
        return
    if UnsafeListener.CLEARTEXT_AUTH in listener.unsafe:
        yield "unsafe", f"clients may send passwords to {listener.address} in clear text"
    beyond = [network for network in listener.allow_networks if not network.is_loopback]
    if listener.tls is ListenerTls.STARTTLS and listener.auth is ListenerAuth.OPTIONAL and beyond:
        yield "require_tls", "false: mail from allow_networks is also accepted in clear text"


def _servers_in_front(listener: ListenerSettings) -> Findings:
    here = [network for network in listener.proxy_networks if network.is_loopback]
    if here:
        remedy = "use another listener for programs that send no PROXY header"
        yield "proxy_networks", f"{here[0]} is this machine; {remedy}"
    pairs = product(listener.xclient_networks, listener.allow_networks)
    trusted = [one for one, other in pairs if one.version == other.version and one.overlaps(other)]
    if trusted and listener.auth is not ListenerAuth.REQUIRED:
        relays = "clients behind it may relay if it sends no XCLIENT"
        yield "xclient_networks", f"{trusted[0]} is also in allow_networks, so {relays}"
