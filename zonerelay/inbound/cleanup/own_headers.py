"""The header of a message as it will be stored: our fields in front, without what is dropped, edited.

What is dropped (`drop_headers`, and the field that names a zone) goes whoever wrote it, and nobody behind the
door sees it: not the policy, not the routes, not who reads the queue. Of the fields that stay every octet is
kept as it came.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from zonerelay.inbound.state.context import ListenerContext
from zonerelay.inbound.state.rewriting import Rewrites
from zonerelay.inbound.state.transaction import Edits
from zonerelay.message.header.edits import edit_header
from zonerelay.message.header.headers import Header
from zonerelay.message.header.received import trace_fields
from zonerelay.model.envelope import Envelope


def without(header: Header, dropped: Set[str]) -> Header:
    """`dropped` in lower case."""
    fields = tuple(field for field in header.fields if field[0].lower() not in dropped)
    return replace(header, fields=fields, names=header.names - dropped)


def with_other_addresses(rewrites: Rewrites, lead: bytes, block: bytes) -> bytes | None:
    """`block` is the whole header as it came; `None` when it stays as it is."""
    rewritten = rewrites.rewrite_header(lead + block)
    return None if rewritten == lead + block else rewritten[len(lead) :]


def own_fields(envelope: Envelope, header: Header, context: ListenerContext) -> bytes:
    """With what must stand between them and the message."""
    return trace_fields(envelope, header, hostname=context.hostname, hide_client=context.settings.hide_client)


def edited(envelope: Envelope, header: Header, held: bytes, edits: Edits, context: ListenerContext) -> bytes:
    """Our own fields, and what came, with fewer fields and others."""
    removed = {name.lower() for name in edits.remove}
    names = header.names - removed | {name.lower() for name, _ in edits.add}
    rest = edit_header(header.lead + held, add=edits.add, remove=edits.remove)
    return own_fields(envelope, replace(header, names=names, lead=b""), context) + rest
