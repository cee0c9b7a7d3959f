"""The certificates of one listener, which are read at the start and when their files change.

A new context is used for new sessions; existing sessions keep theirs. If a changed pair of files is unusable
(certbot replaces certificate and key one after the other), the old pair stays in use, the problem is logged
once and listed in `problems`, and the files are read again later. At the start, the same problem is a
CertificateError, because the relay must not offer TLS that cannot work. An expired certificate is used, with
a warning, because most clients do not verify it and still encrypt.

Files are checked at most once in LOOK_EVERY seconds, and only when a client connects.
"""

import os
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeVar

from cryptography.hazmat.primitives import serialization

from zonerelay.config.settings import ListenerSettings
from zonerelay.inbound.tls import certificate_files
from zonerelay.inbound.tls.certificate_files import CertificateError, CertificatePair
from zonerelay.inbound.tls.channel import TlsChannel, TlsContext
from zonerelay.model.clock import Clock
from zonerelay.process.files import FileState, file_state
from zonerelay.telemetry.events.events import Events

# Builds TLS contexts, and selects a certificate by the name that the client requests (SNI).
#
# Ciphers of TLS 1.2 are those of Mozilla's "intermediate" list without finite-field DH: forward secret and
# AEAD. If a client certificate is requested, any certificate is accepted: access depends on its fingerprint,
# not on its issuer.

CIPHERS = (
    "ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES128-GCM-SHA256:"
    "ECDHE-ECDSA-AES256-GCM-SHA384:ECDHE-RSA-AES256-GCM-SHA384:"
    "ECDHE-ECDSA-CHACHA20-POLY1305:ECDHE-RSA-CHACHA20-POLY1305"
)
TICKETS = 1
"""Tickets of a session. OpenSSL's default is two, and making one takes a tenth of the time of a handshake."""

Context = TypeVar("Context")


def build_context(pairs: Sequence[CertificatePair], *, ask_certificate: bool) -> TlsContext:
    """Return a TLS context for these certificates; SNI selects one, and the first is the default.

    Raise CertificateError if OpenSSL refuses one, OSError if no file descriptor is left.
    """
    if ask_certificate:
        from zonerelay.inbound.tls.asking import AskingContext  # noqa: PLC0415 - pyOpenSSL

        asking = [AskingContext(pair, CIPHERS) for pair in pairs]
        asking[0].choose_by(partial(choose, _by_name(pairs, asking)))
        return asking[0]
    contexts = [server_context(pair) for pair in pairs]
    if len(contexts) > 1:
        by_name = _by_name(pairs, contexts)

        def choose_context(
            session: ssl.SSLObject | ssl.SSLSocket, name: str | None, _: ssl.SSLContext
        ) -> None:
            chosen = choose(by_name, name or "")
            if chosen is not None:
                session.context = chosen

        contexts[0].sni_callback = choose_context
    return contexts[0]


def _by_name(pairs: Sequence[CertificatePair], contexts: Sequence[Context]) -> dict[str, Context]:
    by_name: dict[str, Context] = {}
    for pair, context in zip(pairs, contexts, strict=True):
        for name in pair.names:
            by_name.setdefault(name, context)  # the first certificate with a name is used for it
    return by_name


def choose(by_name: Mapping[str, Context], server_name: str) -> Context | None:
    """Return the context for a host name or its wildcard (RFC 6125 6.4.3), or None for the default one."""
    name = server_name.lower().removesuffix(".")
    found = by_name.get(name)
    if found is None:
        host, _, domain = name.partition(".")
        found = by_name.get(f"*.{domain}") if host else None
    return found


def server_context(pair: CertificatePair) -> ssl.SSLContext:
    """Create a TLS context for one certificate. Raise CertificateError if OpenSSL rejects it, or OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.num_tickets = TICKETS
    try:
        _load(context, pair)
    except ssl.SSLError as error:
        reason = (error.reason or "no reason given").replace("_", " ").lower()
        raise CertificateError(f"OpenSSL refuses the certificate for {pair.name}: {reason}") from error
    return context


def _load(context: ssl.SSLContext, pair: CertificatePair) -> None:
    """Load a certificate and its key into a context from an in-memory file, as `ssl` can only read files."""
    key = pair.key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    chain = [each.public_bytes(serialization.Encoding.PEM) for each in (pair.leaf, *pair.chain)]
    with os.fdopen(os.memfd_create("certificate"), "wb") as file:
        file.write(b"".join([key, *chain]))
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")


LOOK_EVERY = 1.0
TRY_AGAIN = 60.0
"""Seconds until unchanged unusable files are tried again: the cause may have been a temporary system
error.
"""
EXPIRES_SOON = 14 * 86400.0
DAILY = 86400.0
"""Seconds between warnings of expiry, and the lifetime of the keys that encrypt session tickets."""


class CertificateEntry:
    """A pair of certificate and key files, with the last usable certificate and the current problem. With
    `ask_certificate`, a usable one is one that pyOpenSSL can use. `pair` is not set before the first.
    """

    __slots__ = ("_chain", "_parsed", "_seen", "_try_again", "certificate", "key", "pair", "problem")

    def __init__(self, certificate: Path, key: Path, *, ask_certificate: bool) -> None:
        self.certificate = certificate
        self.key = key
        self.pair: CertificatePair
        self.problem = ""
        self._chain: tuple[object, ...] = ()
        # Contents that have not changed are not parsed again.
        self._parsed = lru_cache(1)(partial(_parsed, certificate, key, ask_certificate))
        self._seen: tuple[FileState, FileState] = ((), ())
        self._try_again = 0.0

    def is_due(self, now: float) -> bool:
        if self.problem and now >= self._try_again:
            return True
        return self._states() != self._seen

    def read(self, now: float) -> bool:
        """Read the files, and return whether the certificate has changed. If OpenSSL does not accept it,
        there is a `problem`, and the old one stays.
        """
        # Taken before reading, so that a change during reading is noticed at the next check.
        self._seen = self._states()
        self._try_again = now + TRY_AGAIN
        try:
            found = self._parsed(certificate_files.read_texts(self.certificate, self.key))
        except OSError as error:
            found = f"{self.certificate} cannot be loaded: {error.strerror}"
        except CertificateError as error:
            found = str(error)
        if isinstance(found, str):
            self.problem = found
            return False
        before, self._chain = self._chain, (found.leaf, *found.chain)
        self.pair, self.problem = found, ""
        return self._chain != before

    def _states(self) -> tuple[FileState, FileState]:
        return file_state(self.certificate), file_state(self.key)


def _parsed(certificate: Path, key: Path, ask: bool, texts: tuple[bytes, bytes]) -> CertificatePair | str:
    """Return the certificate and its key if OpenSSL accepts them, or the error message. Raise OSError if no
    descriptor is left.
    """
    try:
        pair = certificate_files.parse_pair(certificate, key, texts)
        build_context([pair], ask_certificate=ask)
    except CertificateError as error:
        return str(error)
    return pair


class Certificates:
    """The certificates of one listener."""

    def __init__(self, settings: ListenerSettings, *, clock: Clock, events: Events) -> None:
        """Read the certificates and keys of the listener. Raise CertificateError with all problems if a file
        is unusable.
        """
        self._address = settings.address
        self._ask_certificate = bool(settings.allow_certificates)
        self._clock = clock
        self._events = events
        self._exposed_reported: set[Path] = set()
        keys = settings.key or settings.certificate
        paths = zip(settings.certificate, keys, strict=True)
        self._entries = [CertificateEntry(*each, ask_certificate=self._ask_certificate) for each in paths]
        for entry in self._entries:
            entry.read(clock.monotonic())
        if problems := dict.fromkeys(entry.problem for entry in self._entries if entry.problem):
            raise CertificateError("\n".join(problems))
        for entry in self._entries:
            self._tell(entry)
        self._context = self._build()
        self._is_outdated = False
        self._next_look = clock.monotonic() + LOOK_EVERY
        self._next_day = clock.monotonic() + DAILY

    def context(self) -> TlsContext:
        """Return the TLS context for a new handshake. Never raise an exception."""
        now = self._clock.monotonic()
        if now >= self._next_look:
            self._look(now, all_files=False)
        return self._context

    def channel(self) -> TlsChannel:
        """Create the TLS channel for a new connection. Never raise an exception."""
        return TlsChannel(self.context())

    def refresh(self) -> None:
        """Read all files again, even if they seem unchanged (at SIGHUP). Never raise an exception."""
        self._look(self._clock.monotonic(), all_files=True)

    @property
    def problems(self) -> tuple[str, ...]:
        """Problems with the certificates for the operator, one sentence each."""
        kept_out = [entry.problem for entry in self._entries if entry.problem]
        return (*kept_out, *self._untimely())

    def expiries(self) -> list[tuple[str, float]]:
        """Return the name of each certificate in use and the Unix time of its expiry."""
        return [(entry.pair.name, entry.pair.not_after) for entry in self._entries]

    def _untimely(self) -> Iterator[str]:
        now = self._clock.now()
        for entry in self._entries:
            if entry.pair.not_after <= now:
                yield f"{entry.certificate}: the certificate of {entry.pair.name} has expired"
            elif entry.pair.not_before > now:
                yield f"{entry.certificate}: the certificate of {entry.pair.name} is not valid yet"

    def _look(self, now: float, *, all_files: bool) -> None:
        self._next_look = now + LOOK_EVERY
        are_new = [self._read_again(entry, now) for entry in self._entries if all_files or entry.is_due(now)]
        self._is_outdated |= any(are_new)
        if now >= self._next_day:
            self._next_day = now + DAILY
            self._tell_expiring(self._entries)
            self._is_outdated = True
        if self._is_outdated:
            with suppress(OSError):  # no descriptor is left: at the next look
                self._context = self._build()
                self._is_outdated = False

    def _read_again(self, entry: CertificateEntry, now: float) -> bool:
        """Read the files of one certificate and its key again, and return whether the certificate has
        changed.
        """
        before, is_new = entry.problem, entry.read(now)
        if entry.problem not in ("", before):
            self._events.certificate_refused(self._address, str(entry.certificate), entry.problem)
        if is_new:
            self._tell(entry)
        return is_new

    def _build(self) -> TlsContext:
        return build_context([entry.pair for entry in self._entries], ask_certificate=self._ask_certificate)

    def _tell(self, entry: CertificateEntry) -> None:
        pair = entry.pair
        self._events.certificate_loaded(
            self._address,
            str(entry.certificate),
            name=pair.name,
            names=len(pair.names),
            expires=pair.not_after,
            fingerprint=pair.fingerprint,
        )
        self._tell_expiring([entry])
        if certificate_files.is_exposed(entry.key) and entry.key not in self._exposed_reported:
            self._exposed_reported.add(entry.key)
            note = f"{entry.key}: the private key is readable by all users of this machine; run chmod o-r"
            self._events.lifecycle("advice", note=note)

    def _tell_expiring(self, entries: list[CertificateEntry]) -> None:
        now = self._clock.now()
        for entry in entries:
            pair = entry.pair
            if pair.not_after < now + EXPIRES_SOON:
                days, file = round((pair.not_after - now) / 86400, 1), str(entry.certificate)
                self._events.certificate_expiring(
                    self._address, file, name=pair.name, expires=pair.not_after, days=days
                )
