"""The forms in which a log or a history may have an address, a client or a domain that is asked for."""

from __future__ import annotations

import contextlib
import fnmatch
import ipaddress
import re
from dataclasses import dataclass

from zonerelay.model.address import Mailbox
from zonerelay.model.message_id import is_message_id
from zonerelay.telemetry.logs.redact import Redactor

_PSEUDONYM = re.compile(r"[uc]-[a-z2-7]{13}(@d-[a-z2-7]{13})?")
_DOMAIN = re.compile(r"d-[a-z2-7]{13}")


class SearchError(Exception):
    """What is searched for cannot be found by any search; the text says why."""


@dataclass(frozen=True, slots=True)
class Form:
    """One value in all forms that a history or a log may have it in."""

    exact: frozenset[str] = frozenset()
    ends: tuple[str, ...] = ()
    pattern: str = ""

    def matches(self, text: str) -> bool:
        lower = text.lower()
        return bool(
            lower in self.exact
            or (self.ends and lower.endswith(self.ends))
            or (self.pattern and fnmatch.fnmatchcase(lower, self.pattern))
        )


def form_of(
    text: str,
    redactor: Redactor | None,
    *,
    clear: bool,
    place: str = "the history",
    way_out: str = '[history] addresses = "clear" keeps addresses',
) -> Form:
    """Of an address, a client, a user, a Message-ID or a message id, or of a domain as `@example.com`.
    `redactor` is `None` without a key; `clear`: addresses are kept as they are in that `place`. Raises
    SearchError.
    """
    with contextlib.suppress(ValueError):
        text = str(ipaddress.ip_address(text))
    lower = text.strip().lower()
    lower = "<>" if lower == "<>" else lower.strip("<>")
    if _PSEUDONYM.fullmatch(lower) or is_message_id(lower):
        return Form(frozenset({lower}))
    if _DOMAIN.fullmatch(lower):
        return Form(ends=(f"@{lower}",))
    domain = lower.removeprefix("*")
    if domain.startswith("@") and "*" not in domain:
        hashed = () if redactor is None else (redactor.mailbox(Mailbox(f"x{domain}")).partition("@")[2],)
        return Form(ends=(domain, *(f"@{each}" for each in hashed)))
    if "*" in lower:
        if clear:
            return Form(pattern=lower)
        raise SearchError(
            f"{text}: {place} has pseudonyms of whole addresses; no part of one can be searched for. Give"
            f" a whole address, or a domain as @example.com; {way_out}"
        )
    if redactor is None or not lower:
        return Form(frozenset({lower}))
    return Form(frozenset({lower, redactor.mailbox(Mailbox(lower)), redactor.client(lower)}))
