"""Converts requests and responses of the ZoneMTA-compatible endpoints `/send` and `/send-raw`.

A token is required, and `X-Authenticated-User` and `X-Originating-IP` are ignored. Unknown fields are
ignored, as in ZoneMTA. Unlike ZoneMTA, a refusal is not a 200 but a problem.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from zonerelay.admin.problems import wrong
from zonerelay.admin.submission.body import JsonBody
from zonerelay.admin.submission.drafts import Submission, address

_SAME = ("subject", "text", "html")
_PEOPLE = ("to", "cc", "bcc")
_HEADERS = {"messageId": "Message-ID", "inReplyTo": "In-Reply-To", "references": "References"}


class ZoneMtaResponse(msgspec.Struct, frozen=True, kw_only=True, rename={"from_": "from"}):
    """The response to a message submitted to `/send` or `/send-raw`."""

    id: str
    from_: str = ""
    to: Sequence[str]
    response: str = "Message queued"


def submission_of(document: Mapping[str, Any], body: JsonBody) -> dict[str, Any]:
    """Convert the fields of ZoneMTA's `/send` to those of a submission, not yet validated. Raise ApiError if
    a field has the wrong type.
    """
    found: dict[str, Any] = {name: document[name] for name in _SAME if document.get(name) is not None}
    found["from"] = _first(document.get("from"), "/from")
    for name in _PEOPLE:
        if document.get(name):
            found[name] = _people(document[name], f"/{name}")
    if document.get("replyTo"):
        found["reply_to"] = _people(document["replyTo"], "/replyTo")
    headers = document.get("headers") or {}
    if isinstance(headers, list):
        headers = {each["key"]: each.get("value") for each in headers if _has_key(each)}
    if not isinstance(headers, dict):
        raise wrong("/headers", "headers must be an object or a list")
    found["headers"] = headers
    for field, name in _HEADERS.items():
        if document.get(field):
            found["headers"] = {**found["headers"], name: document[field]}
    given = document.get("attachments") or []
    if not isinstance(given, list):
        raise wrong("/attachments", "attachments must be a list")
    found["attachments"] = [_attachment(each, body, f"/attachments/{at}") for at, each in enumerate(given)]
    envelope = document.get("envelope")
    if isinstance(envelope, dict):
        to = envelope.get("to") or []
        found["envelope"] = {"from": envelope.get("from") or "", "to": [to] if isinstance(to, str) else to}
    return found


def answer_of(accepted: Any, message: Submission) -> ZoneMtaResponse:
    sender = message.envelope.from_
    if sender is None:
        sender = (
            address(message.from_, "from").mailbox if isinstance(message.from_, str) else message.from_.email
        )
    return ZoneMtaResponse(id=accepted.id, from_=sender, to=[each.address for each in accepted.recipients])


def _has_key(field: object) -> bool:
    return isinstance(field, dict) and isinstance(field.get("key"), str)


_Person = str | dict[str, str]


def _people(given: object, pointer: str) -> list[_Person]:
    """Convert addresses in Nodemailer's formats, such as a string with commas or a list of objects."""
    found: list[_Person] = []
    for each in given if isinstance(given, list) else [given]:
        if isinstance(each, str):
            found.append(each)
        elif isinstance(each, dict) and isinstance(each.get("address"), str):
            found.append({"name": each.get("name") or "", "email": each["address"]})
        else:
            raise wrong(pointer, "an address must be a string or {name, address}")
    return found


def _first(given: object, pointer: str) -> _Person:
    found = _people(given, pointer)
    if len(found) != 1:
        raise wrong(pointer, "expected exactly one address")
    return found[0]


def _attachment(given: object, body: JsonBody, pointer: str) -> dict[str, Any]:
    if not isinstance(given, dict) or not isinstance(given.get("content"), str):
        raise wrong(pointer, "an attachment must have content; files and URLs are not read")
    content = given["content"]
    if given.get("encoding") != "base64":
        if body.long(content):
            raise wrong(pointer, 'a large attachment must be base64-encoded: "encoding": "base64"')
        content = base64.b64encode(content.encode()).decode()
    return {
        "content": content,
        "filename": given.get("filename") or "",
        "content_type": given.get("contentType") or "application/octet-stream",
        "content_id": given.get("cid") or "",
    }
