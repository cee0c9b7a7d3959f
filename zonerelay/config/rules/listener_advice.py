"""What a valid [[listener]], [auth] or [[access]] implies that its operator may not expect. See `advice`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from zonerelay.config.options.endpoints import parse_listen
from zonerelay.config.settings import (
    CLEARTEXT_AUTH_WORDS,
    OPEN_RELAY_WORDS,
    AccessAction,
    AuthSettings,
    ListenerAuth,
    ListenerSettings,
    ListenerTls,
    Network,
    Settings,
)

SUBMISSIONS = 465
STARTS_IN_CLEAR = (25, 587)


def listener_advice(settings: Settings) -> Iterator[str]:
    for at, listener in enumerate(settings.listener):
        for key, text in _of(listener):
            yield f"listener[{at}].{key}: {text}"
    yield from _users(settings)
    yield from _access(settings)


def has_users(settings: Settings) -> bool:
    """Whether a client can be somebody: by AUTH, or because a server in front says so."""
    return any(each.auth is not ListenerAuth.OFF or each.xclient_networks for each in settings.listener)


def _of(listener: ListenerSettings) -> Iterator[tuple[str, str]]:
    yield from _port(listener)
    yield from _files(listener)
    yield from _log_in(listener)
    yield from _relaying(listener)
    yield from _servers_in_front(listener)
    yield from _zone_header(listener)
    if listener.hide_client:
        yield (
            "hide_client",
            "true: a Received field does not say where a message came from; the log does, by message id",
        )


def _port(listener: ListenerSettings) -> Iterator[tuple[str, str]]:
    port = parse_listen(listener.address).port
    if listener.tls is ListenerTls.IMPLICIT and port in STARTS_IN_CLEAR:
        yield (
            "tls",
            f"implicit on port {port}: clients wait for a greeting in clear text there, and never get one; "
            f'say tls = "starttls", or port {SUBMISSIONS}',
        )
    elif listener.tls is not ListenerTls.IMPLICIT and port == SUBMISSIONS:
        yield (
            "tls",
            f"{listener.tls} on port {SUBMISSIONS}: clients begin TLS at once there, and are turned away; "
            'say tls = "implicit", or port 587',
        )


def _files(listener: ListenerSettings) -> Iterator[tuple[str, str]]:
    policy_files = [listener.policy_file] if listener.policy_file is not None else []
    for key, files in (
        ("certificate", listener.certificate),
        ("key", listener.key),
        ("policy_file", policy_files),
    ):
        for file in files:
            if not file.is_absolute():
                yield key, _relative(file)
                break


def _relative(file: Path) -> str:
    return f"{file} is looked for in the directory where the relay is started: write the path in full"


def _log_in(listener: ListenerSettings) -> Iterator[tuple[str, str]]:
    if listener.auth is ListenerAuth.OFF or listener.tls is ListenerTls.IMPLICIT or listener.require_tls:
        return
    if listener.cleartext_auth == CLEARTEXT_AUTH_WORDS:
        yield "cleartext_auth", f"passwords may come to {listener.address} in clear text"
    beyond = [network for network in listener.allow_networks if not network.is_loopback]
    if listener.tls is ListenerTls.STARTTLS and listener.auth is ListenerAuth.OPTIONAL and beyond:
        yield (
            "require_tls",
            "false: who logs in has to use TLS, but mail of allow_networks is taken in clear text too",
        )


def _relaying(listener: ListenerSettings) -> Iterator[tuple[str, str]]:
    if listener.open_relay == OPEN_RELAY_WORDS:
        yield "open_relay", f"anybody who reaches {listener.address} may relay"
    usual = ListenerSettings().allow_networks
    if listener.auth is ListenerAuth.REQUIRED and listener.allow_networks not in (usual, ()):
        yield (
            "allow_networks",
            'not used with auth = "required": users may log in from anywhere, and nobody relays without',
        )


def _servers_in_front(listener: ListenerSettings) -> Iterator[tuple[str, str]]:
    here = [network for network in listener.proxy_networks if network.is_loopback]
    if here:
        yield (
            "proxy_networks",
            f"{here[0]} is this machine: programs here that connect without a PROXY header get no greeting; "
            "give them a listener of their own",
        )
    trusted = [each for each in listener.xclient_networks if _overlaps(each, listener.allow_networks)]
    if trusted and listener.auth is not ListenerAuth.REQUIRED:
        yield (
            "xclient_networks",
            f"{trusted[0]} is in allow_networks too: whatever it passes on without XCLIENT may relay",
        )


def _zone_header(listener: ListenerSettings) -> Iterator[tuple[str, str]]:
    if listener.zone_header and not (listener.zone_header_users or listener.zone_header_networks):
        yield (
            "zone_header",
            f"{listener.zone_header} is taken out of every message, and nobody is trusted to name a zone in "
            "it: list zone_header_users or zone_header_networks",
        )
    if listener.zone_header_users and listener.auth is ListenerAuth.OFF and not listener.xclient_networks:
        yield "zone_header_users", "never matches: nobody can log in to this listener"


def _overlaps(network: Network, others: tuple[Network, ...]) -> bool:
    return any(network.version == other.version and network.overlaps(other) for other in others)


def _users(settings: Settings) -> Iterator[str]:
    needed = any(listener.auth is not ListenerAuth.OFF for listener in settings.listener)
    if needed and not settings.auth.credentials.is_absolute():
        yield f"auth.credentials: {_relative(settings.auth.credentials)}"
    if not needed and settings.auth != AuthSettings():
        yield 'auth: not used: no listener has auth = "optional" or "required"'


def _access(settings: Settings) -> Iterator[str]:
    rules = settings.access
    if rules and rules[-1].action is AccessAction.ACCEPT:
        yield (
            f"access[{len(rules) - 1}].action: accept as the last rule changes nothing: what no rule matches "
            "is let through; a rule that refuses the rest has to follow"
        )
    if not has_users(settings):
        yield from (
            f'access[{at}].user: never matches: no listener has auth = "optional" or "required"'
            for at, rule in enumerate(rules)
            if rule.user
        )
