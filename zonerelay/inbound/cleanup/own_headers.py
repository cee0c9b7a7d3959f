"""Builds the header of a message for the store: adds our own fields, removes dropped fields and applies
edits.

Dropped fields (`drop_headers`, and the field that names a zone) are removed from every message, so the
policy, the routes and readers of the queue never see them. The remaining fields are not changed in any byte.
"""

from __future__ import annotations

from collections.abc import Set

from msgspec import structs

from zonerelay.inbound.state.context import ListenerContext
from zonerelay.inbound.state.transaction import HeaderEdits, HeaderRules
from zonerelay.message.header.address_fields import edit_header
from zonerelay.message.header.headers import Header, trace_fields
from zonerelay.model.envelope import Envelope


def without(header: Header, dropped: Set[str]) -> Header:
    """Return the header without the fields named in `dropped`, in lower case."""
    fields = tuple(field for field in header.fields if field[0].lower() not in dropped)
    return structs.replace(header, fields=fields, names=header.names - dropped)


def with_other_addresses(rewrites: HeaderRules, lead: bytes, block: bytes) -> bytes | None:
    """Rewrite addresses in the whole header `block`, or return None if nothing changes."""
    rewritten = rewrites.rewrite_header(lead + block)
    return None if rewritten == lead + block else rewritten[len(lead) :]


def own_fields(envelope: Envelope, header: Header, context: ListenerContext) -> bytes:
    """Return Received and the missing fields, with the separator that `header` needs."""
    return trace_fields(envelope, header, hostname=context.hostname, hide_client=context.settings.hide_client)


def edited(
    envelope: Envelope, header: Header, held: bytes, edits: HeaderEdits, context: ListenerContext
) -> bytes:
    """Return our own fields, then `held` (the header and the bytes after it) with `edits` applied."""
    removed = {name.lower() for name in edits.remove}
    names = header.names - removed | {name.lower() for name, _ in edits.add}
    rest = edit_header(header.lead + held, add=edits.add, remove=edits.remove)
    return own_fields(envelope, structs.replace(header, names=names, lead=b""), context) + rest
