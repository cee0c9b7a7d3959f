"""The settings for who may use the relay and for what: [auth] and [[access]]. Import them from `models`."""

# ruff: noqa: RUF009  (the makers return dataclasses.field(), which is what that rule asks for)

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from zonerelay.config.options.options import (
    DAY,
    MINUTE,
    Form,
    choice,
    count,
    duration,
    networks,
    path,
    text,
    texts,
)
from zonerelay.config.tables.intake import Network


class AccessAction(enum.StrEnum):
    """What an [[access]] rule does with what it matches."""

    REFUSE = "refuse"
    DEFER = "defer"
    ACCEPT = "accept"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthSettings:
    """[auth]: one file for all listeners."""

    credentials: Path = path(
        Path("/etc/zonerelay/credentials"),
        "Users and the argon2 hashes of their passwords, kept by zonerelay user. Read when a listener has "
        "auth; a changed file is taken up at the next log-in.",
    )
    max_client_failures: int = count(
        10,
        "Failed log-ins from one client (an IPv4 address, an IPv6 /64) within forget_failures; then it is "
        "answered 454 4.7.0 without a look at its password. Users who have logged in from its network lately "
        "have counters of their own.",
    )
    max_network_failures: int = count(
        50, "The same for one network (an IPv4 /24, an IPv6 /48), whatever the client."
    )
    max_account_failures: int = count(
        100,
        "The same for one account, wherever from. It never keeps users out of networks from which they have "
        "logged in lately.",
    )
    forget_failures: float = duration(
        15 * MINUTE, "How long a failed log-in counts against its client.", most=DAY
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """[[access]]. All conditions that are given must match; the first rule that matches decides."""

    client: tuple[Network, ...] = networks((), "Addresses and networks of clients.")
    sender: tuple[str, ...] = texts(
        (),
        'Envelope senders: "user@example.com", "example.com", "*.example.com" (every name below it), '
        '"bounce-*@example.com", "<>" (the null sender).',
        form=Form.ADDRESS_PATTERNS,
    )
    recipient: tuple[str, ...] = texts((), "Recipients, in the same forms.", form=Form.ADDRESS_PATTERNS)
    user: tuple[str, ...] = texts((), 'Users who have logged in; "*" is any of them.')
    action: AccessAction = choice(
        AccessAction.REFUSE,
        "What happens to this recipient. refuse: 550 5.7.1; defer: 450 4.7.1, the client tries again; "
        "accept: no later rule is asked. accept lets nobody relay who could not without it.",
    )
    reply: str = text(
        "",
        'Another reply: "554 5.7.1 Ask postmaster@example.org" (5yz) for refuse, 4yz for defer.',
        form=Form.REPLY,
    )
