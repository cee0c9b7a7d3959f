"""What must hold within one [[listener]]: closed to strangers, TLS that works, no password in clear text.

Whether files are there and can be used is not looked at here: `check-config` and the start try them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from pathlib import Path

from zonerelay.config.options.problems import Report
from zonerelay.config.options.toml_lines import KeyPath
from zonerelay.config.options.wording import in_words, quoted
from zonerelay.config.settings import (
    CLEARTEXT_AUTH_WORDS,
    OPEN_RELAY_WORDS,
    ListenerAuth,
    ListenerSettings,
    ListenerTls,
    Network,
    Settings,
)

# Shorter than these, networks are a good part of the Internet, not somebody's own. Networks that cover
# everything in pieces (0.0.0.0/1 and 128.0.0.0/1) are put together before they are measured.
_OPEN_IPV4_PREFIX = 7
_OPEN_IPV6_PREFIX = 15
_LOCAL_IPV6 = (ipaddress.IPv6Network("fc00::/7"), ipaddress.IPv6Network("fe80::/10"))


def check_listeners(settings: Settings, report: Report) -> None:
    if not settings.listener and report.sound("listener"):
        report.refuse(("listener",), "there is none, so nobody could hand in mail: add a [[listener]]")
    for at, listener in enumerate(settings.listener):
        path: KeyPath = ("listener", at)
        _check_words(listener, path, report)
        _check_relaying(listener, path, report, takes_reports=bool(settings.srs.domain))
        _check_trusted(listener, path, report)
        _check_policy(listener, path, report)
        _check_zone_header(listener, path, report)
        if report.sound(*path, "tls"):
            _check_tls(listener, path, report)
            _check_auth(listener, path, report)


def _check_words(listener: ListenerSettings, path: KeyPath, report: Report) -> None:
    if listener.open_relay not in ("", OPEN_RELAY_WORDS):
        report.refuse((*path, "open_relay"), f'if anybody may relay, say exactly "{OPEN_RELAY_WORDS}"')
    elif listener.open_relay and listener.auth is ListenerAuth.REQUIRED:
        report.refuse(
            (*path, "open_relay"),
            'is not used with auth = "required", which lets nobody relay without logging in: leave one of '
            "the two out",
        )
    if listener.cleartext_auth not in ("", CLEARTEXT_AUTH_WORDS):
        report.refuse(
            (*path, "cleartext_auth"), f'if AUTH is to work without TLS, say exactly "{CLEARTEXT_AUTH_WORDS}"'
        )


def _check_relaying(
    listener: ListenerSettings, path: KeyPath, report: Report, *, takes_reports: bool
) -> None:
    """`takes_reports`: with [srs] a listener is of use to everybody, even if nobody may relay."""
    key = (*path, "allow_networks")
    wide = _open_to_all(listener.allow_networks)
    if wide and listener.auth is ListenerAuth.REQUIRED:
        report.refuse(
            key,
            'is not used with auth = "required": whoever logs in may relay from anywhere. Leave it out',
        )
    elif wide and listener.open_relay != OPEN_RELAY_WORDS:
        report.refuse(
            key,
            f"{in_words(map(str, wide))} would make this an open relay, which spammers find within hours: "
            f'name your own networks, or say open_relay = "{OPEN_RELAY_WORDS}"',
        )
    ways = ("allow_networks", "allow_certificates", "auth")
    useless = not takes_reports and not _lets_somebody_relay(listener)
    if useless and all(report.sound(*path, way) for way in ways):
        report.refuse(
            key,
            'is empty, so nobody could relay: name a network, such as "127.0.0.0/8", or say '
            'auth = "required"',
        )


def _lets_somebody_relay(listener: ListenerSettings) -> bool:
    # Who can reach a Unix socket is decided by its directory, not by an address.
    if listener.address.startswith("unix:") or listener.auth is not ListenerAuth.OFF:
        return True
    return bool(listener.allow_networks or listener.allow_certificates or listener.open_relay)


def _check_trusted(listener: ListenerSettings, path: KeyPath, report: Report) -> None:
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
        elif networks and listener.address.startswith("unix:"):
            report.refuse(
                (*path, key),
                "is not used on a Unix socket, whose clients have no address: let the servers in front "
                'connect to an address, such as "127.0.0.1:2526"',
            )


def _check_policy(listener: ListenerSettings, path: KeyPath, report: Report) -> None:
    if listener.policy_file is not None and not listener.policy and report.sound(*path, "policy"):
        report.refuse(
            (*path, "policy_file"),
            'is not used without a policy: say policy = "module:Class" or leave it out',
        )


def _check_zone_header(listener: ListenerSettings, path: KeyPath, report: Report) -> None:
    for key in ("zone_header_users", "zone_header_networks"):
        if getattr(listener, key) and not listener.zone_header and report.sound(*path, "zone_header"):
            report.refuse(
                (*path, key),
                'is not used without the name of the field: say zone_header = "X-Sending-Zone"',
            )
    if listener.zone_header_networks and listener.address.startswith("unix:"):
        report.refuse(
            (*path, "zone_header_networks"),
            "is not used on a Unix socket, whose clients have no address: trust users, or let those "
            'clients connect to an address, such as "127.0.0.1:2526"',
        )


def _check_tls(listener: ListenerSettings, path: KeyPath, report: Report) -> None:
    certificates, keys = listener.certificate, listener.key
    if listener.tls is ListenerTls.NONE:
        for key in ("certificate", "key", "allow_certificates"):
            if getattr(listener, key) and report.sound(*path, key):
                report.refuse(
                    (*path, key), 'is not used with tls = "none": say tls = "starttls" or "implicit"'
                )
    elif not certificates and report.sound(*path, "certificate"):
        report.refuse(
            (*path, "tls"),
            f'"{listener.tls}" needs certificate = "FILE" and key = "FILE" (zonerelay cert self-signed makes '
            "both)",
        )
    if report.sound(*path, "certificate") and report.sound(*path, "key"):
        _check_pairs(certificates, keys, path, report)
    if listener.require_tls and listener.tls is ListenerTls.NONE:
        report.refuse((*path, "require_tls"), 'needs tls = "starttls" (with "implicit" there is always TLS)')


def _check_pairs(certificates: Sequence[Path], keys: Sequence[Path], path: KeyPath, report: Report) -> None:
    if certificates and keys and len(keys) != len(certificates):
        report.refuse(
            (*path, "key"),
            f"{_files(len(keys))} for {_files(len(certificates))} in certificate: give one for each, in the "
            "same order, or none when the keys are in the certificate files",
        )
    for at, certificate in enumerate(certificates):
        first = certificates.index(certificate)
        if first < at:
            report.refuse(
                (*path, "certificate", at),
                f"{quoted(str(certificate))} is certificate[{first}] already: was another one meant?",
            )


def _files(number: int) -> str:
    return f"{number} file{'s' if number != 1 else ''}"


def _check_auth(listener: ListenerSettings, path: KeyPath, report: Report) -> None:
    if listener.auth is ListenerAuth.OFF or listener.tls is not ListenerTls.NONE or listener.cleartext_auth:
        return
    if not report.sound(*path, "cleartext_auth"):
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
