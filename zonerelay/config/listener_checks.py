"""What must hold within one [[listener]]: closed to strangers, TLS that works, no password in clear text."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from zonerelay.config.models import (
    CLEARTEXT_AUTH_WORDS,
    OPEN_RELAY_WORDS,
    ListenerAuth,
    ListenerSettings,
    ListenerTls,
    Network,
    Settings,
)
from zonerelay.config.problems import Report
from zonerelay.config.toml_lines import Path
from zonerelay.config.wording import in_words

# Shorter than these, networks are a good part of the Internet, not somebody's own. Networks that cover
# everything in pieces (0.0.0.0/1 and 128.0.0.0/1) are put together before they are measured.
_OPEN_IPV4_PREFIX = 7
_OPEN_IPV6_PREFIX = 15
_LOCAL_IPV6 = (ipaddress.IPv6Network("fc00::/7"), ipaddress.IPv6Network("fe80::/10"))


def check_listeners(settings: Settings, report: Report) -> None:
    if not settings.listener and report.sound("listener"):
        report.refuse(("listener",), "there is none, so nobody could hand in mail: add a [[listener]]")
    for at, listener in enumerate(settings.listener):
        path: Path = ("listener", at)
        _check_words(listener, path, report)
        _check_relaying(listener, (*path, "allow_networks"), report)
        _check_trusted(listener, path, report)
        if report.sound(*path, "tls"):
            _check_tls(listener, path, report)
            _check_auth(listener, path, report)


def _check_words(listener: ListenerSettings, path: Path, report: Report) -> None:
    if listener.open_relay not in ("", OPEN_RELAY_WORDS):
        report.refuse((*path, "open_relay"), f'if anybody may relay, say exactly "{OPEN_RELAY_WORDS}"')
    if listener.cleartext_auth not in ("", CLEARTEXT_AUTH_WORDS):
        report.refuse(
            (*path, "cleartext_auth"), f'if AUTH is to work without TLS, say exactly "{CLEARTEXT_AUTH_WORDS}"'
        )


def _check_relaying(listener: ListenerSettings, path: Path, report: Report) -> None:
    wide = _open_to_all(listener.allow_networks)
    if wide and listener.open_relay != OPEN_RELAY_WORDS:
        report.refuse(
            path,
            f"{in_words(map(str, wide))} would make this an open relay, which spammers find within hours: "
            f'name your own networks, or say open_relay = "{OPEN_RELAY_WORDS}"',
        )
    # Who can reach a Unix socket is decided by its directory, not by an address.
    others = listener.address.startswith("unix:") or listener.auth is not ListenerAuth.OFF
    if not (listener.allow_networks or listener.allow_certificates or others) and report.sound(*path):
        report.refuse(path, 'is empty, so nobody could relay: name a network, such as "127.0.0.0/8"')


def _check_trusted(listener: ListenerSettings, path: Path, report: Report) -> None:
    """Whoever is listed here can say that a client is somebody else."""
    for key, networks in (
        ("proxy_networks", listener.proxy_networks),
        ("xclient_networks", listener.xclient_networks),
    ):
        if wide := _open_to_all(networks):
            report.refuse(
                (*path, key),
                f"{in_words(map(str, wide))} would let anybody claim any address: name the servers in front "
                "of this one",
            )


def _check_tls(listener: ListenerSettings, path: Path, report: Report) -> None:
    certificates, keys = listener.certificate, listener.key
    if listener.tls is ListenerTls.NONE:
        for key in ("certificate", "key", "allow_certificates"):
            if getattr(listener, key):
                report.refuse(
                    (*path, key), 'is not used with tls = "none": say tls = "starttls" or "implicit"'
                )
    elif not certificates and report.sound(*path, "certificate"):
        report.refuse(
            (*path, "tls"), f'"{listener.tls}" needs a certificate (zonerelay cert self-signed makes one)'
        )
    if keys and len(keys) != len(certificates) and report.sound(*path, "key"):
        report.refuse(
            (*path, "key"),
            f"there are {len(keys)} for {len(certificates)} in certificate: give one for each, in their "
            "order, or none when the keys are in the certificate files",
        )
    if listener.require_tls and listener.tls is ListenerTls.NONE:
        report.refuse((*path, "require_tls"), 'needs tls = "starttls"')


def _check_auth(listener: ListenerSettings, path: Path, report: Report) -> None:
    if listener.auth is ListenerAuth.OFF or listener.tls is not ListenerTls.NONE or listener.cleartext_auth:
        return
    report.refuse(
        (*path, "auth"),
        f'"{listener.auth}" with tls = "none" would send passwords in clear text: give the listener tls, '
        f'or say cleartext_auth = "{CLEARTEXT_AUTH_WORDS}"',
    )


def _open_to_all(networks: Iterable[Network]) -> list[Network]:
    """The networks, put together where they touch, that are too wide to be anybody's own."""
    ipv4: list[ipaddress.IPv4Network] = []
    ipv6: list[ipaddress.IPv6Network] = []
    for network in networks:
        if isinstance(network, ipaddress.IPv4Network):
            ipv4.append(network)
        else:
            ipv6.append(network)
    wide4 = [net for net in ipaddress.collapse_addresses(ipv4) if net.prefixlen <= _OPEN_IPV4_PREFIX]
    wide6 = [
        net
        for net in ipaddress.collapse_addresses(ipv6)
        if net.prefixlen <= _OPEN_IPV6_PREFIX and not any(net.subnet_of(local) for local in _LOCAL_IPV6)
    ]
    return [*wide4, *wide6]
