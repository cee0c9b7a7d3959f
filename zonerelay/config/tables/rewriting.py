"""The settings for what is changed in mail: [[dkim]], [srs] and [[rewrite]]. Import them from `models`."""

# ruff: noqa: RUF009  (the makers return dataclasses.field(), which is what that rule asks for)

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from zonerelay.config.options.options import (
    DAY,
    YEAR,
    Form,
    choice,
    date,
    duration,
    path,
    switch,
    text,
    texts,
)


class RewriteWhere(enum.StrEnum):
    """Which addresses a [[rewrite]] changes."""

    ALL = "all"
    ENVELOPE = "envelope"
    SENDER = "sender"
    RECIPIENT = "recipient"
    HEADER = "header"


@dataclass(frozen=True, slots=True, kw_only=True)
class DkimSettings:
    """[[dkim]]: a signing key. Every entry whose domain and dates fit signs (RSA and Ed25519 together)."""

    domain: str = text(
        "",
        'The domain in From whose mail is signed: "example.com", or "*.example.com" for every name below it. '
        "An entry for the very name goes before one with a wildcard.",
        form=Form.DOMAIN,
    )
    selector: str = text(
        "", "The key's name: its public half is at SELECTOR._domainkey.DOMAIN.", form=Form.SELECTOR
    )
    key_file: Path = path(Path(), "The private key, PEM: RSA of at least 1024 bits (use 2048), or Ed25519.")
    signing_domain: str = text(
        "",
        'The domain that signs (d=), if it is another one than that in From: with domain = "*.example.com", '
        '"example.com" needs one key record for all. Empty: the domain in From.',
        form=Form.DOMAIN,
    )
    not_before: float = date("Sign from this time on, so that a key can be published first. Empty: now.")
    not_after: float = date("Sign until this time. Empty: for ever.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SrsSettings:
    """[srs]: the sender rewriting scheme, for zones with srs = true. `domain` empty: off."""

    domain: str = text(
        "",
        "The domain of rewritten senders: a name whose MX is this relay and whose SPF record allows its "
        "addresses. Reports to such addresses are taken from everybody, and go to the first sender.",
        form=Form.DOMAIN,
    )
    secret: str = text(
        "",
        "Where the secret is that signs such addresses, as in password of [[credential]]; at least 16 "
        "characters.",
        form=Form.SECRET,
    )
    old_secrets: tuple[str, ...] = texts(
        (), "Where former secrets are, which are still accepted.", form=Form.SECRETS
    )
    local_domains: tuple[str, ...] = texts(
        (),
        'Senders in these domains are not rewritten: their SPF records allow this relay. "example.com", '
        '"*.example.com".',
        form=Form.DOMAINS,
    )
    max_age: float = duration(
        21 * DAY, "How long reports to a rewritten sender are taken.", least=DAY, most=YEAR
    )
    accept_legacy: bool = switch(
        False,
        "Take reports to senders in the form of postsrsd, libsrs2 and Mail::SRS, whose short hash can be "
        "guessed: for max_age after taking over from one of these. After an upgrade from a version of this "
        "relay with that form it is done without asking.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteSettings:
    """[[rewrite]]: other addresses for those that match, when mail comes in; the first match counts."""

    address: tuple[str, ...] = texts(
        (),
        'Addresses to change: "user@old.example", "old.example" (everybody there), "*.old.example", '
        '"app-*@example.com".',
        form=Form.ADDRESS_PATTERNS,
    )
    to: str = text(
        "",
        'What they become: "user@example.com", or "@example.com" to keep what is before the @.',
        form=Form.REPLACEMENT,
    )
    where: RewriteWhere = choice(
        RewriteWhere.ALL,
        "sender, recipient: of the envelope; envelope: both; header: From, Sender, Reply-To, To and Cc; all: "
        "everywhere.",
    )
    user: tuple[str, ...] = texts((), 'Only in mail of these logged-in users; "*" is any of them.')
    listener: tuple[str, ...] = texts(
        (), "Only in mail that came in at these listeners, each written as its address is.", form=Form.LISTENS
    )
