"""The certificates of one listener: read at the start, and again when their files change.

A new context serves new sessions; sessions in progress keep theirs. A pair of files that cannot be used when
it changes (certbot replaces certificate and key one after the other) is kept out: the old pair stays in use,
the problem is logged once and shown in `problems`, and the files are tried again. At the start the same
problem is a CertificateError: the relay must not offer TLS that cannot work. An expired certificate is used,
with a warning, because most clients encrypt without a look at it.

Files are looked at once in LOOK_EVERY at most, and only when a client connects.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from OpenSSL import SSL

from zonerelay.config.settings import ListenerSettings
from zonerelay.inbound.tls.certificate_files import (
    CertificateError,
    Pair,
    Signature,
    Texts,
    is_exposed,
    parse_pair,
    read_texts,
    signature,
)
from zonerelay.inbound.tls.channel import TlsChannel
from zonerelay.inbound.tls.contexts import build_context
from zonerelay.model.clock import Clock
from zonerelay.telemetry.events.events import Events

LOOK_EVERY = 1.0
TRY_AGAIN = 60.0
"""For files that are wrong and do not change: perhaps only descriptors had run out, or a disk was away."""
EXPIRES_SOON = 14 * 86400.0
DAILY = 86400.0
"""How often expiry is told; also how long the keys last that session tickets are encrypted with."""


class _Entry:
    """One pair of files: what was last read of it that is good, and what is wrong with it now."""

    __slots__ = ("_digest", "_result", "_seen", "_try_again", "certificate", "key", "pair", "problem")

    def __init__(self, certificate: Path, key: Path) -> None:
        self.certificate = certificate
        self.key = key
        self.pair: Pair | None = None
        self.problem = ""
        self._digest = b""  # of what was last in the files
        self._result: Pair | str = ""  # what came of it, or what was wrong with it
        self._seen: tuple[Signature, Signature] = (None, None)
        self._try_again = 0.0

    def is_due(self, now: float) -> bool:
        if self.problem and now >= self._try_again:
            return True
        return self._signatures() != self._seen

    def read(self, now: float) -> Pair:
        """A pair that OpenSSL takes; the same one as long as the files hold the same.

        Raises CertificateError.
        """
        # Before reading: what changes meanwhile is seen at the next look.
        self._seen = self._signatures()
        self._try_again = now + TRY_AGAIN
        texts = read_texts(self.certificate, self.key)
        digest = hashlib.sha256(b"%d %b%b" % (len(texts[0]), *texts)).digest()
        if digest != self._digest:
            self._result, self._digest = self._parsed(texts), digest
        if isinstance(self._result, str):
            raise CertificateError(self._result)
        return self._result

    def _parsed(self, texts: Texts) -> Pair | str:
        try:
            pair = parse_pair(self.certificate, self.key, texts)
            build_context([pair], ask_certificate=False)
        except CertificateError as error:
            return str(error)
        return pair

    def _signatures(self) -> tuple[Signature, Signature]:
        of_certificate = signature(self.certificate)
        return of_certificate, of_certificate if self.key == self.certificate else signature(self.key)


class Certificates:
    def __init__(self, settings: ListenerSettings, *, clock: Clock, events: Events) -> None:
        """Reads all files. Raises CertificateError with everything that is wrong with them."""
        self._address = settings.address
        self._ask_certificate = bool(settings.allow_certificates)
        self._clock = clock
        self._events = events
        self._told_exposed: set[Path] = set()
        keys = settings.key or settings.certificate
        self._entries = [_Entry(*paths) for paths in zip(settings.certificate, keys, strict=True)]
        self._read_first()
        self._context = self._build()
        self._next_look = clock.monotonic() + LOOK_EVERY
        self._next_day = clock.monotonic() + DAILY

    def context(self) -> SSL.Context:
        """Return the context for a handshake that begins now. Never raises."""
        now = self._clock.monotonic()
        if now >= self._next_look:
            self._look(now, all_files=False)
        return self._context

    def channel(self) -> TlsChannel:
        """Return a channel for a client that connects now. Never raises."""
        return TlsChannel(self.context())

    def refresh(self) -> None:
        """Read the files now, whether or not they seem changed (SIGHUP). Never raises."""
        self._look(self._clock.monotonic(), all_files=True)

    @property
    def problems(self) -> tuple[str, ...]:
        """Problems for the operator, a sentence each."""
        kept_out = [entry.problem for entry in self._entries if entry.problem]
        return (*kept_out, *self._untimely())

    def expiries(self) -> list[tuple[str, float]]:
        """The name of each certificate in use and the Unix time when it expires."""
        return [(pair.name, pair.not_after) for pair in self._pairs()]

    def _pairs(self) -> list[Pair]:
        return [entry.pair for entry in self._entries if entry.pair is not None]

    def _untimely(self) -> Iterator[str]:
        now = self._clock.now()
        for entry in self._entries:
            if entry.pair is None:
                continue
            if entry.pair.not_after <= now:
                yield f"{entry.certificate}: the certificate of {entry.pair.name} has expired"
            elif entry.pair.not_before > now:
                yield f"{entry.certificate}: the certificate of {entry.pair.name} is not valid yet"

    def _read_first(self) -> None:
        now = self._clock.monotonic()
        problems = []
        for entry in self._entries:
            try:
                entry.pair = entry.read(now)
            except CertificateError as error:
                problems.append(str(error))
        if problems:
            raise CertificateError("\n".join(dict.fromkeys(problems)))
        for entry in self._entries:
            self._tell(entry)

    def _look(self, now: float, *, all_files: bool) -> None:
        self._next_look = now + LOOK_EVERY
        changed = [entry for entry in self._entries if all_files or entry.is_due(now)]
        is_new = False
        for entry in changed:
            is_new |= self._read_again(entry, now)
        a_day_later = now >= self._next_day
        if a_day_later:
            self._next_day = now + DAILY
            self._tell_expiring(self._entries)
        if is_new or a_day_later:
            self._context = self._build()

    def _read_again(self, entry: _Entry, now: float) -> bool:
        """True when another certificate is to be used from now on."""
        try:
            pair = entry.read(now)
        except CertificateError as error:
            problem = str(error)
            if problem != entry.problem:
                self._events.certificate_refused(self._address, str(entry.certificate), problem)
            entry.problem = problem
            return False
        entry.problem = ""
        if entry.pair is not None and (pair.leaf, pair.chain) == (entry.pair.leaf, entry.pair.chain):
            return False
        entry.pair = pair
        self._tell(entry)
        return True

    def _build(self) -> SSL.Context:
        return build_context(self._pairs(), ask_certificate=self._ask_certificate)

    def _tell(self, entry: _Entry) -> None:
        pair = entry.pair
        assert pair is not None
        self._events.certificate_loaded(
            self._address,
            str(entry.certificate),
            name=pair.name,
            names=len(pair.names),
            expires=pair.not_after,
            fingerprint=pair.fingerprint,
        )
        self._tell_expiring([entry])
        if is_exposed(entry.key) and entry.key not in self._told_exposed:
            self._told_exposed.add(entry.key)
            note = f"{entry.key}: every user of this machine can read the private key: chmod o-r it"
            self._events.lifecycle("advice", note=note)

    def _tell_expiring(self, entries: list[_Entry]) -> None:
        soon = self._clock.now() + EXPIRES_SOON
        for entry in entries:
            pair = entry.pair
            if pair is not None and pair.not_after < soon:
                self._events.certificate_expiring(
                    self._address, str(entry.certificate), name=pair.name, expires=pair.not_after
                )
