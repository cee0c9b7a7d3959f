"""[log], [history] and [admin]: the log on stderr, what became of mail, HTTP, the control socket."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zonerelay.config.endpoints import parse_listen
from zonerelay.config.options import forms
from zonerelay.config.options.options import (
    DAY,
    GB,
    MB,
    YEAR,
    choice,
    duration,
    networks,
    optional_path,
    size,
    switch,
    text,
    texts,
)
from zonerelay.config.problems import Report
from zonerelay.config.tables.listener import Network


class LogFormat(enum.StrEnum):
    JSON = "json"
    TEXT = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """[log]"""

    format: LogFormat = choice(LogFormat.JSON)
    """json: one object per line for collectors; text: key=value for people. On stderr."""
    redact: bool = switch(True)
    """Replace addresses in log text by stable pseudonyms (a keyed hash), so that logs hold no personal data
    and can still be searched.
    """
    redact_key_file: Path | None = optional_path()
    """The key of those pseudonyms. Empty: a key of its own, made beside the spool. Share one file between
    machines whose logs are to be joined.
    """


class HistoryAddresses(enum.StrEnum):
    HASHED = "hashed"
    CLEAR = "clear"


@dataclass(frozen=True, slots=True, kw_only=True)
class HistorySettings:
    """[history]"""

    enabled: bool = switch(True)
    """Keep what became of mail (accepted, refused, each attempt, the outcome) in the directory history beside
    the spool, for "zonerelay log find". Mail never waits for it.
    """
    keep: float = duration(14 * DAY, least=DAY, most=10 * YEAR)
    """How long it is kept."""
    max_size: int = size(1 * GB, least=16 * MB)
    """Of the file of each worker. The oldest goes first when it is full; a message with one recipient takes
    about a kilobyte.
    """
    addresses: HistoryAddresses = choice(HistoryAddresses.HASHED)
    """hashed: addresses are the pseudonyms of the log, and a search computes the pseudonym of what it is
    given. clear: as they are, which anyone who may read the files sees.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminSettings:
    """[admin]. `address` empty: no HTTP at all. `socket` empty: `control.sock` beside the spool."""

    address: str = text("127.0.0.1:8025", form=forms.listen, optional=True)
    """HTTP: /metrics, /healthz, /readyz for monitoring, /v1/ for programs with a token (zonerelay token), the
    page. Empty: none at all. When another program has it, mail moves all the same: zonerelay status says so,
    and it is taken when it is free.
    """
    page: bool = switch(False)
    """Serve the operators' page at /. Off loopback it needs a certificate or a proxy of proxy_networks."""
    certificate: Path | None = optional_path()
    """A PEM file with the certificate and its chain: everything is then served over TLS. Read again when it
    is renewed.
    """
    key: Path | None = optional_path()
    """Its private key. Empty: it is in the same file."""
    proxy_networks: tuple[Network, ...] = networks(())
    """Reverse proxies whose X-Forwarded-For and X-Forwarded-Proto are believed. Off loopback the API and the
    page are served over TLS or to such a proxy only.
    """
    hosts: tuple[str, ...] = texts((), form=forms.domain)
    """Names by which HTTP may be asked for besides localhost and addresses ("*.example.org": every name below
    it), so that no web page comes here under a name of its own. On another address than loopback /metrics,
    /healthz and /readyz answer to every name.
    """
    token_file: Path | None = optional_path()
    """A file with one token more, of scope operate: a line of 32 characters at least. zonerelay token add
    makes better ones, with a name, a scope and an end.
    """
    socket: Path | None = optional_path()
    """The Unix socket that the command line talks to; its file rights decide who may. Empty: control.sock
    beside the spool.
    """


def check_admin(admin: AdminSettings, report: Report) -> None:
    if admin.key is not None and admin.certificate is None:
        report.refuse(("admin", "key"), "is of no use without admin.certificate")
    for network in admin.proxy_networks:
        if network.prefixlen == 0:
            report.refuse(
                ("admin", "proxy_networks"),
                f"{network} would let every client claim any address: name the proxies in front",
            )
    if admin.page and admin.address and not _keeps_secrets(admin):
        report.refuse(
            ("admin", "page"),
            f"{admin.address} can be reached from other machines, and who logs in there would send a token "
            "in clear text: give admin.certificate and admin.key (zonerelay cert self-signed makes them), "
            "name a proxy with TLS in admin.proxy_networks, or listen on 127.0.0.1",
        )


def admin_advice(admin: AdminSettings) -> Iterator[str]:
    if admin.token_file is not None:
        yield (
            "admin.token_file: one token that may do everything and does not expire; zonerelay token add "
            "makes others, with a name, a scope and an end"
        )
    if not admin.address or parse_listen(admin.address).is_loopback:
        return
    api = "the API asks for a token" if _keeps_secrets(admin) else "the API is closed to them without TLS"
    yield f"admin.address: metrics and health at {admin.address} can be read from other machines ({api})"


def _keeps_secrets(admin: AdminSettings) -> bool:
    """Tokens do not travel in clear text: on this machine, over TLS, or from a proxy that has TLS."""
    return parse_listen(admin.address).is_loopback or bool(admin.certificate or admin.proxy_networks)
