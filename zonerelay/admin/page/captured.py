"""The pages for captured mail: a searchable list, a view of one message, deletion and release.

The HTML of a message is a separate document in a frame. The frame's sandbox and the document's policy prevent
it from running scripts, loading anything, and navigating away. Files are downloaded and never shown. The
pages require scope `operate`, because the list shows the beginning of each message. Opening a message is
logged.
"""

from urllib.parse import urlencode

from aiohttp import web

from zonerelay.admin.mailpit import CapturedMail, file_response, html_response, number_of
from zonerelay.admin.operators import Operators
from zonerelay.admin.page.visitor import PageRequest, see_other
from zonerelay.capture.parts import MimeParts, take_apart
from zonerelay.capture.store import CaptureRow, SearchError
from zonerelay.config.units import plural
from zonerelay.process.threads import OPERATORS

ROWS = 50
MAX_SHOWN = 256 * 1024
"""Characters of a text or a source that are shown."""
VIEWS = ("html", "text", "source", "headers", "attachments", "links")


class CapturedPages:
    """The pages for captured mail."""

    def __init__(self, operators: Operators) -> None:
        self.mail = CapturedMail(operators)

    async def list(self, visitor: PageRequest) -> web.StreamResponse:
        q, start = visitor.given("q"), number_of(visitor.given("start"))
        try:
            rows, matched, _ = await self.mail.ask(lambda each: each.find(q, start=start, limit=ROWS))
        except SearchError as error:
            return await visitor.page("captured.html", 400, q=q, problem=error)
        totals = await self.mail.ask(lambda each: each.totals())
        behind = f"/captured?{urlencode({'q': q, 'start': start + ROWS})}"
        return await visitor.page(
            "captured.html",
            q=q,
            problem="",
            rows=rows,
            matched=matched,
            totals=totals,
            keep=visitor.operators.settings().capture.keep,
            is_first=not start,
            next=behind if start + ROWS < matched else "",
        )

    async def delete(self, visitor: PageRequest) -> web.StreamResponse:
        """Delete one captured message, or all that match a search."""
        q, one = visitor.given("q"), visitor.given("id")
        ids = [one] if one else None
        count = await self.mail.ask(lambda each: each.delete(ids=ids, query=q))
        self.mail.note(visitor.caller, f"{count} captured messages deleted")
        return see_other(f"/captured?{urlencode({'q': q})}" if one and q else "/captured")

    async def message(self, visitor: PageRequest) -> web.StreamResponse:
        summary, parts, octets = await self._read(visitor)
        absent = {
            "html": not parts.html,
            "text": parts.html and not parts.text,
            "attachments": not (parts.attachments or parts.inline),
            "links": not parts.links(),
        }
        there = [view for view in VIEWS if not absent.get(view)]
        view = visitor.given("view") if visitor.given("view") in there else there[0]
        shown = {"text": parts.text, "source": octets[: 4 * MAX_SHOWN + 4].decode("utf-8", "replace")}.get(
            view, ""
        )
        return await visitor.page(
            "captured_message.html",
            mail=summary,
            parts=parts,
            view=view,
            views=there,
            shown=shown[:MAX_SHOWN],
            is_cut=len(shown) > MAX_SHOWN,
            release_to=self.mail.release_to,
        )

    async def html(self, visitor: PageRequest) -> web.StreamResponse:
        _, parts, _ = await self._read(visitor, is_noted=True)
        return html_response(await OPERATORS.run(parts.html_to_show))

    async def part(self, visitor: PageRequest) -> web.StreamResponse:
        _, parts, _ = await self._read(visitor, is_noted=True)
        return file_response(parts, visitor.request.match_info["part"])

    async def release(self, visitor: PageRequest) -> web.StreamResponse:
        message_id = visitor.request.match_info["id"]
        to = [text] if (text := visitor.given("to").strip()) else []
        count = await self.mail.release(message_id, to, visitor.caller)
        line = f"Released for {plural(count, 'recipient')}. The message remains in the capture store."
        return await visitor.done(line, back=f"/captured/{message_id}")

    async def _read(
        self, visitor: PageRequest, *, is_noted: bool = False
    ) -> tuple[CaptureRow, MimeParts, bytes]:
        """Read a captured message, and parse its MIME parts. With `is_noted`, the previous page has already
        logged the access. Raise NotFoundError if it does not exist.
        """
        by = "" if is_noted else visitor.caller
        summary, octets = await self.mail.read(visitor.request.match_info["id"], by, mark=not is_noted)
        return summary, await OPERATORS.run(take_apart, octets), octets
