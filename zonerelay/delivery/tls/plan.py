"""Decides the TLS requirements of a connection from the route's policy and DNS, and verifies the server after
the handshake.

DANE (RFC 7672 2.2) applies if the demand says that the MX records were secure, and only to hosts whose
addresses are secure, because an attacker could forge a TLSA record behind an insecure answer. Then

- usable records: the certificate must match one of them, whatever else was demanded, and the connection never
  falls back to clear text. The records replace the demand of an MTA-STS policy and of the message; an
  operator's `verify` applies in addition.
- only unusable records: encryption, with any certificate.
- a failed or bogus look-up: the host is not used now, because an attacker can cause the failure. Only a
  secure denial, or an answer from a part of DNS without DNSSEC, leaves the demand unchanged.

With `tls = dane` a host without usable records is not used. With `tls = none` DNS is not queried. HostFailure
is raised if the host cannot be used.

`TlsPolicy` has the TLS contexts for peers, and remembers hosts whose TLS is broken. `opportunistic` and
`required` encrypt without authentication of the peer (RFC 7435: unauthenticated encryption is better than
none, and most MX certificates do not match). `verify` and MTA-STS need a certificate of a trusted authority,
whose chain and dates OpenSSL checks during the handshake. Names, fingerprints and TLSA records are checked by
`prove`, before any command inside TLS, so that a refusal can report what the certificate contains instead.
Only `opportunistic` falls back to clear text, on a new connection, and remembers the host, so that not every
message pays for a failed handshake.

Since OpenSSL 3.5 the first message of a handshake contains post-quantum keys and needs more than one packet,
and some hosts and firewalls never answer it. A host that does not answer a handshake is tried once more with
only one group (P-256, which every server supports), and for a day if that was the cause.

`ResumingContext` resumes TLS sessions with servers (RFC 8446 2.2), which saves two thirds of a handshake's
CPU. A session is offered only to the name and by the context with which it was made, so a certificate that
was not verified never counts as verified, and none does after the trusted authorities have changed. Names are
checked again, in the certificate of the session. Connections with DANE or pinned certificates resume none:
`prove` refuses it, because they need the chain that the server shows now.
"""

import functools
import ssl
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from zonerelay.config.settings import TlsMode, ZoneSettings
from zonerelay.delivery.peer import HostFailure, Terms, UntrustedCertificateError
from zonerelay.delivery.tls import dane
from zonerelay.delivery.tls.dane import fingerprint, matching_name, names_in, shown_names
from zonerelay.model.bounded import BoundedDict, ExpiringSet
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery
from zonerelay.model.reply import Reply
from zonerelay.process.webclient import SystemTrust, trusting
from zonerelay.routing.addresses import ascii_domain
from zonerelay.routing.destinations.route import MxHost, Route, TlsDemand
from zonerelay.routing.dns.answers import CNAME, TLSA, Addresses, TlsaRecord
from zonerelay.routing.dns.resolver import Resolver
from zonerelay.smtp.client.replies import printable

MAX_SESSIONS = 500
"""Servers whose sessions are kept, of a few kilobytes each."""
LIFETIME = 3600.0
"""Seconds after which the server must show its certificate again."""


class _StoredSession(NamedTuple):
    """A TLS session that a server may resume. `shown` is the monotonic time at which it was stored."""

    session: ssl.SSLSession
    shown: float


class ResumingContext(ssl.SSLContext):
    """A TLS context that offers each server its newest stored session for resumption."""

    def __init__(self, protocol: int, clock: Clock) -> None:
        self._clock = clock
        self._kept: BoundedDict[str, _StoredSession] = BoundedDict(MAX_SESSIONS)

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        kept = self._kept.get(str(server_hostname))
        if kept is not None and self._clock.monotonic() < kept.shown + LIFETIME:
            session = kept.session
        return super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)

    def keep(self, name: str, tls: ssl.SSLObject) -> None:
        """Store the TLS session of a verified connection. Call it once the server has answered over TLS,
        because the session ticket arrives after the handshake.
        """
        before = self._kept.pop(name, None)
        session, shown = tls.session, self._clock.monotonic()
        if session is None or not session.has_ticket:
            return
        if tls.session_reused:
            if before is None:
                return
            shown = before.shown
        self._kept[name] = _StoredSession(session, shown)

    def forget(self, name: str) -> None:
        """Discard the stored session of a server, because a handshake has failed or the session must not be
        resumed.
        """
        self._kept.pop(name, None)


SMALL_FOR = 24 * 3600.0
_SMALL_GROUP = "prime256v1"


class TlsPolicy:
    """The TLS contexts for outgoing connections. Each is built at its first use, because loading the trusted
    authorities takes milliseconds.
    """

    def __init__(self, clock: Clock, *, remember_broken: float) -> None:
        self.clock = clock
        self.broken = ExpiringSet[str](clock, remember_broken)
        """Hosts (`name:port`) whose TLS failed. `opportunistic` sends to them in clear text."""
        self.small = ExpiringSet[str](clock, SMALL_FOR)
        """Hosts (`name:port`) that answer a handshake only with one group."""
        self._encrypting = functools.cache(functools.partial(self._made, verify=False))
        self._verifying = functools.cache(
            lambda small: SystemTrust(functools.partial(self._made, verify=True, small=small))
        )

    def context(self, *, verify: bool, small: bool) -> ResumingContext:
        return self._verifying(small).context() if verify else self._encrypting(small=small)

    def _made(self, *, verify: bool, small: bool) -> ResumingContext:
        context = ResumingContext(ssl.PROTOCOL_TLS_CLIENT, self.clock)
        if verify:
            trusting(context)
        context.check_hostname = False  # `prove` checks several names, and reports the certificate's
        context.verify_mode = ssl.CERT_REQUIRED if verify else ssl.CERT_NONE
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if small:
            context.set_ecdh_curve(_SMALL_GROUP)
        return context


MTA_STS = "mta-sts"


class TlsRequirements(msgspec.Struct, frozen=True):
    """The TLS requirements of an outgoing connection: whether to use TLS, and how to verify the server.
    `level` is the demand that applies: a `TlsMode`, or "mta-sts". `why` is a clause for display.

    `name` is sent in the handshake (SNI). With `verify`, a trusted authority must certify one of `names`.
    With `certificates`, the certificate must be one of these, with any issuer. With `tlsa`, the certificate
    must match one of these, with `tlsa_names` for records that need a name, of which `next_hop` is not the
    host's own.
    """

    level: str
    name: str
    why: str = ""
    on_connect: bool = False
    verify: bool = False
    names: tuple[str, ...] = ()
    certificates: tuple[str, ...] = ()
    tlsa: tuple[TlsaRecord, ...] = ()
    tlsa_names: tuple[str, ...] = ()
    next_hop: str = ""

    @property
    def encrypts(self) -> bool:
        return self.level != TlsMode.NONE

    @property
    def may_fall_back(self) -> bool:
        """Whether mail may be sent in clear text if TLS fails. With TLS on connect there is no clear text."""
        return self.level == TlsMode.OPPORTUNISTIC and not self.on_connect

    @property
    def may_resume(self) -> bool:
        """Whether the TLS session of an earlier connection may be resumed. DANE and pinned certificates need
        the server's present chain.
        """
        return not (self.tlsa or self.certificates)

    def in_clear(self) -> "TlsRequirements":
        return TlsRequirements(TlsMode.NONE, self.name)


def named_after(deliveries: Sequence[Delivery], route: Route, zone: ZoneSettings) -> Route:
    """Return the route with the recipient domains of these deliveries as its name, if DANE applies to it.

    Domains at the same hosts share a route, which is named after one of them. With DANE-TA a certificate for
    the domain alone is valid (RFC 7672 3.2.2), so it must not count for another domain's mail.
    """
    if route.tls is None or not route.tls.dane or zone.next_hop:
        return route
    domains = dict.fromkeys(delivery.domain for delivery in deliveries)
    try:
        name = ", ".join(dict.fromkeys(ascii_domain(domain) for domain in domains))
    except ValueError:  # an address literal
        return route
    return route if name == route.name else structs.replace(route, name=name)


async def requirements(resolver: Resolver, terms: Terms, host: MxHost, found: Addresses) -> TlsRequirements:
    """Return the TLS requirements of a connection to a host. `found` are the addresses of the host to
    which the connection is about to be made. Raise HostFailure if DNS excludes the host.
    """
    demand = terms.tls
    plan = _as_demanded(terms, demand, host)
    mandatory = demand.mode is TlsMode.DANE
    if not plan.encrypts or not (demand.dane or mandatory):
        return plan
    if mandatory and host.literal:
        raise _unusable(host, "is an address, but DANE requires a host name")
    if not demand.dane:
        raise _unusable(
            host, f"was found through MX records of {terms.route.name} that are not secured by DNSSEC"
        )
    for base in await _base_domains(resolver, host, found):
        answer = await resolver.lookup(f"_{host.port}._tcp.{base}", TLSA)
        if not answer.status.is_definite:
            raise _unusable(host, f"has TLSA records, but the lookup failed: {answer.status}")
        if answer.secure and answer.records:
            usable = dane.usable(answer.records)
            if not usable:
                return _with_unusable(plan, host, base)
            return _held_to(plan, terms, host, base, usable)
    if mandatory:
        why = "has no TLSA records" if found.secure else "has addresses that are not secured by DNSSEC"
        raise _unusable(host, f"{why}, and {plan.why}")
    return plan


async def _base_domains(resolver: Resolver, host: MxHost, found: Addresses) -> list[str]:
    """Return the names at which to look for TLSA records (RFC 7672 2.2.2). The end of a secure CNAME chain
    comes first, then the host name itself.
    """
    if host.literal:
        return []
    if found.secure:
        return [found.canonical, host.name] if found.canonical else [host.name]
    if not found.canonical:
        return []
    # The name may be secure although the target of its alias is not.
    alias = await resolver.lookup(host.name, CNAME)
    if not alias.status.is_definite:
        raise _unusable(host, f"has an alias, but its lookup failed: {alias.status}")
    return [host.name] if alias.secure else []


def _as_demanded(terms: Terms, demand: TlsDemand, host: MxHost) -> TlsRequirements:
    mode = demand.mode
    from_policy = mode is TlsMode.VERIFY and demand.because == MTA_STS
    return TlsRequirements(
        level=MTA_STS if from_policy else mode,
        name=host.name,
        why=f"{_who(terms, demand)} requires {_WHAT.get(mode, 'a valid certificate')}",
        on_connect=terms.zone.tls_on_connect and mode is not TlsMode.NONE,
        verify=mode is TlsMode.VERIFY and not demand.certificates,
        names=demand.names or (host.name,),
        certificates=demand.certificates if mode is TlsMode.VERIFY else (),
    )


def _held_to(
    plan: TlsRequirements, terms: Terms, host: MxHost, base: str, usable: tuple[TlsaRecord, ...]
) -> TlsRequirements:
    name = terms.route.name
    is_plain_domain = "." in name and all(each.isalnum() or each in ".-_" for each in name)
    domain = name if is_plain_domain else ""
    return structs.replace(
        plan,
        level=TlsMode.DANE,
        name=base,
        why=f"the TLSA records of {base} require a matching certificate",
        verify=plan.verify and terms.tls.because not in (MTA_STS, "message"),
        tlsa=usable,
        tlsa_names=tuple(dict.fromkeys(each for each in (base, host.name, domain) if each)),
        next_hop=domain if domain not in (base, host.name) else "",
    )


def _with_unusable(plan: TlsRequirements, host: MxHost, base: str) -> TlsRequirements:
    """Return the requirements for a host whose TLSA records are all unusable: at least TLS, with any
    certificate (RFC 7672 2.2).
    """
    if plan.level == TlsMode.DANE:
        raise _unusable(host, f"has no usable TLSA record, and {plan.why}")
    if plan.level == TlsMode.OPPORTUNISTIC:
        return structs.replace(plan, level=TlsMode.REQUIRED, why=f"the TLSA records of {base} require TLS")
    return plan


_WHAT = {
    TlsMode.OPPORTUNISTIC: "nothing",
    TlsMode.REQUIRED: "TLS",
    TlsMode.DANE: "a certificate that matches the TLSA records",
}


def _who(terms: Terms, demand: TlsDemand) -> str:
    match demand.because:
        case "mta-sts":
            return f"the MTA-STS policy of {terms.route.name}"
        case "message":
            return "the message"
        case "destination":
            return terms.route.terms or "a [[destination]]"
        case _:
            return f"zone {terms.zone.name}"


def _unusable(host: MxHost, what: str) -> HostFailure:
    return HostFailure(Reply(451, "7.5", f"{host.name} {what}"), asked=False)


ENCRYPTED = "encrypted"
"""The security of a connection without a demand on the certificate."""

_TOO_WEAK = {"DH_KEY_TOO_SMALL": "its Diffie-Hellman key", "EE_KEY_TOO_SMALL": "the key of its certificate"}
_UNKNOWN_ISSUER = (
    "its certificate is not issued by an authority that this machine trusts, or an intermediate certificate "
    "is missing"
)
_VERIFY_CODES = {
    9: "its certificate is not valid yet",
    10: "its certificate has expired",
    18: "its certificate is self-signed, and this machine does not trust it",
} | dict.fromkeys((2, 19, 20, 21), _UNKNOWN_ISSUER)
"""OpenSSL's X509_V_ERR_ codes."""


class PeerVerification(NamedTuple):
    """The security of a connection, as determined by verifying the server's certificate. `only_for` is the
    only next hop for which the certificate is valid, or "" for all.
    """

    security: str
    only_for: str = ""


def prove(plan: TlsRequirements, tls: ssl.SSLObject, *, now: float) -> PeerVerification:
    """Verify the server's certificate against the TLS requirements, and return the security of the
    connection. Raise UntrustedCertificateError.
    """
    if tls.session_reused and not plan.may_resume:
        raise UntrustedCertificateError("the TLS session was resumed, so its current certificate is unknown")
    if plan.verify:
        _check_names(plan, tls)
    if plan.certificates:
        _check_fingerprint(plan, tls)
    if plan.tlsa:
        name = dane.verify(peer_chain(tls), plan.tlsa, plan.tlsa_names, now=now)
        return PeerVerification("dane", name if name and name == plan.next_hop else "")
    if plan.verify or plan.certificates:
        return PeerVerification("mta-sts" if plan.level == MTA_STS else "verified")
    return PeerVerification(ENCRYPTED)


def handshake_words(error: BaseException) -> str:
    """Return the reason why a handshake failed, as a message for an operator. A library's error has OpenSSL's
    as its cause.
    """
    if error.__cause__ is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__
    if isinstance(error, ssl.SSLCertVerificationError):
        unknown = f"its certificate is not valid: {error.verify_message}"
        return _VERIFY_CODES.get(error.verify_code, unknown)
    if isinstance(error, ssl.SSLError) and (weak := _TOO_WEAK.get(error.reason)):
        return f'{weak} is too small; with tls = "opportunistic", a zone sends to this host in clear text'
    if isinstance(error, ssl.SSLError) and error.reason:
        return str(error.reason).lower().replace("_", " ")
    return printable(str(error)) or type(error).__name__


def _check_names(plan: TlsRequirements, tls: ssl.SSLObject) -> None:
    names = names_in(tls.getpeercert() or {})
    if matching_name(plan.names, names) is None:
        wanted = " or ".join(plan.names)
        raise UntrustedCertificateError(f"its certificate is for {shown_names(names)}, not for {wanted}")


def _check_fingerprint(plan: TlsRequirements, tls: ssl.SSLObject) -> None:
    shown = tls.getpeercert(binary_form=True)
    if not shown:
        raise UntrustedCertificateError("the server presented no certificate")
    if fingerprint(shown) not in plan.certificates:
        raise UntrustedCertificateError(
            f"its certificate is not one of the expected ones; its fingerprint is {fingerprint(shown)}"
        )


_ENCODING_DER = 2  # X509_FILETYPE_ASN1


def peer_chain(tls: ssl.SSLObject) -> list[bytes]:
    """Return the certificates that the server has sent, in DER and beginning with its own.

    DANE-TA needs the whole chain, verified or not. Python 3.13 has a public method for it; 3.11 and 3.12 have
    the same method, not public yet, on the object that `SSLObject` wraps.
    """
    # `Any`: the object differs between versions of Python.
    connection: Any = tls if hasattr(tls, "get_unverified_chain") else tls._sslobj  # type: ignore[attr-defined]
    found = connection.get_unverified_chain() or ()
    return [each if isinstance(each, bytes) else each.public_bytes(_ENCODING_DER) for each in found]
