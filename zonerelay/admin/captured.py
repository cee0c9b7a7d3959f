"""Serves captured mail to the page and to Mailpit's API: reads it in a thread, logs access, and releases
messages over SMTP.

Reading a message is logged with the name of the token. The sandbox does not log it: its mail is not secret,
and its API requires no token.
"""

from __future__ import annotations

import smtplib
from collections.abc import Callable, Sequence
from typing import TypeVar

from zonerelay.admin.operators import Operators
from zonerelay.capture.store import Capture, CaptureError, CaptureRow, open_capture
from zonerelay.config.endpoints import parse_listen
from zonerelay.operations.errors import NotFoundError
from zonerelay.outbox.drafts import BadRowError, addresses
from zonerelay.process.threads import CAPTURED, OPERATORS, PoolBusyError

T = TypeVar("T")

RELEASE_TIMEOUT = 30.0


class ReleaseError(Exception):
    """The captured message could not be released. The text explains why."""


class CapturedMail:
    """Accesses captured mail for the page and for Mailpit's API. The store is opened at the first query."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators
        self.sandbox = operators.sandbox
        self._capture: Capture | None = None

    @property
    def release_to(self) -> str:
        """The address of the server for released mail. If it is empty, nothing may be released."""
        return self._operators.settings().capture.release_to

    async def ask(self, question: Callable[[Capture], T]) -> T:
        """Run a query on the store in a thread, and return its result. Raise NotFoundError if no mail is
        captured, CaptureError or SearchError on failure.
        """
        if not self._operators.captures:
            raise NotFoundError('no mail is captured: no [[zone]] has next_hop = "capture:"')
        try:
            return await CAPTURED.run(self._ask, question)
        except PoolBusyError:
            raise CaptureError("too many requests for captured mail are being processed; try again") from None

    def _ask(self, question: Callable[[Capture], T]) -> T:
        if self._capture is None:
            settings, now = self._operators.settings(), self._operators.clock.now
            self._capture = self.sandbox.capture if self.sandbox else open_capture(settings, now)
        return question(self._capture)

    async def read(
        self, message_id: str, by: str, *, mark: bool = True, query: str = "", tz: str = ""
    ) -> tuple[CaptureRow, bytes] | None:
        """Return a message, or None if it does not exist. Raise SearchError or CaptureError on failure."""
        found = await self.ask(lambda capture: capture.read(message_id, mark=mark, query=query, tz=tz))
        if found is not None:
            self.note(by, f"captured message {found[0].id} read")
        return found

    def note(self, by: str, request: str) -> None:
        if self.sandbox is None:
            self._operators.audit({"by": by, "request": request})

    async def release(self, message_id: str, to: Sequence[str], by: str) -> int:
        """Send the message to `[capture] release_to`, for these recipients or for its own. It stays captured.
        Return the number of recipients. Raise ReleaseError or CaptureError on failure.
        """
        address = self.release_to
        if not address:
            raise ReleaseError(
                "captured mail cannot be released: set [capture] release_to to the address of a server"
            )
        found = await self.ask(lambda capture: capture.read(message_id, mark=False))
        if found is None:
            raise ReleaseError("the message no longer exists")
        summary, octets = found
        try:
            recipients = [each.mailbox for text in to for each in addresses(text, "To")] or summary.recipients
        except BadRowError as error:
            raise ReleaseError(str(error)) from error
        self.note(by, f"captured message {summary.id} released for {len(recipients)} recipients")
        await OPERATORS.run(_submit, address, summary.sender, recipients, octets)
        return len(recipients)


def _submit(address: str, sender: str, recipients: Sequence[str], octets: bytes) -> None:
    target = parse_listen(address)
    try:
        with smtplib.SMTP(target.host, target.port, timeout=RELEASE_TIMEOUT) as client:
            client.ehlo_or_helo_if_needed()
            options = [
                option
                for option, is_needed in (
                    ("SMTPUTF8", not all(map(str.isascii, (sender, *recipients)))),
                    ("BODY=8BITMIME", not octets.isascii()),
                )
                if is_needed and client.has_extn(option.removeprefix("BODY="))
            ]
            refused = client.sendmail(sender, list(recipients), octets, mail_options=options)
    except smtplib.SMTPRecipientsRefused as error:
        refused = error.recipients
    except (OSError, smtplib.SMTPException, ValueError) as error:
        raise ReleaseError(f"{address} did not accept the message: {error}") from error
    if refused:
        replies = "; ".join(
            f"<{who}>: {code} {text.decode('utf-8', 'replace')}" for who, (code, text) in refused.items()
        )
        raise ReleaseError(f"{address} rejected {replies}")


__all__ = ["CaptureError", "CapturedMail", "ReleaseError"]
