"""Converts domain names to A-labels for DNS and TLS: lower case, without a final dot.

Only this module uses the idna library (IDNA 2008 with UTS #46 mapping). Plain ASCII names bypass the library,
because it rejects characters of real names (underscores). Functions raise ValueError with the reason as text.
"""

from __future__ import annotations

import re
from functools import lru_cache

import idna

MAX_NAME = 253  # RFC 1035 2.3.4, as text without the final dot

_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)


@lru_cache(8192)
def ascii_domain(domain: str) -> str:
    """Return the ASCII form: `Bücher.Example.` becomes `xn--bcher-kva.example`. Raise ValueError."""
    name = domain.lower().removesuffix(".")
    if not name.isascii():
        name = _encode(name)
    if not name or len(name) > MAX_NAME:
        raise ValueError(f"a domain name must have 1 to {MAX_NAME} characters")
    if not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise ValueError("not a domain name")
    return name


def _encode(name: str) -> str:
    try:
        return idna.encode(name, uts46=True, std3_rules=True).decode("ascii").removesuffix(".")
    except idna.IDNAError as error:
        raise ValueError("not a valid internationalized domain name") from error


def is_literal(domain: str) -> bool:
    """Return whether a text has the form of an address literal, valid or not."""
    return domain.startswith("[")
