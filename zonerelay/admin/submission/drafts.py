"""Validates submissions, and converts them to drafts, from which messages are composed.

An error is a 422 with a JSON pointer for each invalid field. The values are checked like the columns of the
outbox (`outbox/drafts`): no line ends in a header field, no field that the relay itself creates, valid SMTP
addresses, and their domains as A-labels.
"""

import contextlib
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Annotated

import msgspec
from msgspec.structs import replace

from zonerelay.admin.problems import ApiError, FieldError, malformed, pointer_to, texts_in
from zonerelay.admin.submission.body import JsonBody, StoredBase64
from zonerelay.config.settings import ListenerSettings, Settings
from zonerelay.inbound.cleanup.intake import is_key
from zonerelay.inbound.cleanup.submit import SubmitOptions, SubmittedEnvelope
from zonerelay.inbound.state.context import IDEMPOTENCY_KEY
from zonerelay.inbound.state.transaction import ZoneHeader
from zonerelay.message.compose import Address, AttachedFile, Base64Text, Draft
from zonerelay.model.envelope import (
    METADATA,
    NULL_SENDER,
    TAG,
    BodyType,
    Mailbox,
    Recipient,
    domain_of,
    recipient_key,
)
from zonerelay.outbox import drafts
from zonerelay.outbox.drafts import (
    MAX_FILES,
    BadRowError,
    HeaderFields,
    checked_file,
    checked_subject,
    checked_text,
)
from zonerelay.smtp.server.params import MailCommand

address = lru_cache(maxsize=1024)(drafts.address)
addresses = lru_cache(maxsize=1024)(drafts.addresses)
"""Cached, because the same addresses are frequent."""
MAX_TAGS = 10
MAX_METADATA = 20
MAX_NOTE = 256
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Person(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An email address with an optional name."""

    email: str
    name: str = ""


One = str | Person
"""`a@b.example`, `Name <a@b.example>` or an object. A recipients string may contain several, with commas."""
Some = One | tuple[One, ...]


class Attachment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file attached to a submitted message. `content` is base64. With a `content_id`, the HTML can show it
    as `cid:…`.
    """

    content: str
    filename: str = ""
    content_type: str = "application/octet-stream"
    content_id: str = ""


Uploads = Sequence[AttachedFile]
"""The files that were uploaded as parts of a form."""


class ExplicitEnvelope(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"from_": "from"}
):
    """An explicit envelope, which replaces the addresses in the header. `from` "" is the null sender."""

    from_: str | None = None
    to: tuple[str, ...] = ()


class Submission(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"from_": "from"}
):
    """A submitted message, as the JSON body of `POST /v1/messages` describes it. `send_at` is Unix seconds or
    RFC 3339; `partial` accepts the message for the recipients that are not refused; `tags` and `metadata` are
    stored with the message and not sent.
    """

    from_: One
    to: Some = ()
    cc: Some = ()
    bcc: Some = ()
    reply_to: Some = ()
    subject: str = ""
    text: str | None = None
    html: str | None = None
    headers: dict[str, str] = {}
    attachments: tuple[Attachment, ...] = ()
    tags: tuple[str, ...] = ()
    metadata: dict[str, str | int | float | bool] = {}
    send_at: float | Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    require_tls: bool = False
    envelope: ExplicitEnvelope = ExplicitEnvelope()
    zone: str = ""
    partial: bool = False


class ValidatedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message whose submitted fields are valid, with its envelope and submission options. `pointers` maps
    each recipient to the field that names it; `draft` is None if the message was sent as bytes.
    """

    envelope: SubmittedEnvelope
    pointers: Mapping[Mailbox, str]
    message_id: str
    options: SubmitOptions
    draft: Draft | None = None


class SubmissionOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """The user and client that submit a message, its idempotency key, and the settings that apply to it."""

    user: str
    client: str
    key: str
    settings: Settings
    listener: ListenerSettings


BAD_KEY = "an idempotency key must consist of 1 to 255 visible ASCII characters"


class FieldErrors:
    """Collects the errors in all fields of a request."""

    def __init__(self) -> None:
        self._found: list[FieldError] = []

    def add(self, pointer: str, detail: str) -> None:
        self._found.append(FieldError(pointer=pointer, detail=detail))

    @contextlib.contextmanager
    def at(self, pointer: str) -> Iterator[None]:
        """Record an error that the `with` block raises as an error of this field, and continue after the
        block.
        """
        try:
            yield
        except BadRowError as error:
            self.add(pointer, str(error))

    def end(self) -> None:
        """Raise ApiError with all recorded errors, if there are any."""
        if self._found:
            first = self._found[0]
            raise ApiError(422, "invalid", f"{first.pointer}: {first.detail}", errors=self._found)


def sending_of(
    given: Submission, body: JsonBody, origin: SubmissionOrigin, now: float, uploads: Uploads = ()
) -> ValidatedMessage:
    """Validate a submission, and return the message to submit. Raise ApiError with all errors if it is
    invalid.
    """
    faults = FieldErrors()
    author = _one(given.from_, "from", faults)
    to, cc, bcc = (_some(getattr(given, name), name, faults) for name in ("to", "cc", "bcc"))
    headers: list[tuple[str, str | Sequence[Address]]] = []
    if reply_to := _some(given.reply_to, "reply_to", faults):
        headers.append(("Reply-To", [each for each, _ in reply_to]))
    if named_key := [value for name, value in given.headers.items() if name.lower() == IDEMPOTENCY_KEY]:
        origin = replace(origin, key=named_key[0])
        if not is_key(origin.key):
            faults.add("/headers/Idempotency-Key", BAD_KEY)
    fields = HeaderFields()
    for name, value in given.headers.items():
        with faults.at(pointer_to("headers", name)):
            field = fields.checked(name, value)
            if field is not None and not (reply_to and field[0].lower() == "reply-to"):
                headers.append(field)
    if not (
        given.subject or given.text is not None or given.html is not None or given.attachments or uploads
    ):
        faults.add("/text", "a message requires a subject, a text, HTML or an attachment")
    with faults.at("/subject"):
        checked_subject(given.subject)
    text, html = _text(given.text, body, "/text", faults), _text(given.html, body, "/html", faults)
    files = _files(given, body, uploads, faults)
    options = _options(given, origin, faults)
    hold_until = _hold_until(given, origin, now, faults)
    sender = NULL_SENDER if author is None else author.mailbox
    if given.envelope.from_ is not None:
        with faults.at("/envelope/from"):
            sender = address(given.envelope.from_, "from").mailbox if given.envelope.from_ else NULL_SENDER
    recipients = _recipients(given, [*to, *cc, *bcc], faults)
    if body.spills:
        rest = msgspec.to_builtins(given)
        for name in ("text", "html", "attachments"):
            del rest[name]
        for pointer, each in texts_in(rest):
            if body.long(each):
                faults.add(pointer, "only text, html and the content of attachments may be that long")
    faults.end()
    assert author is not None
    message_id = next((value for name, value in headers if name == "Message-ID"), None)
    if not isinstance(message_id, str):
        message_id = new_message_id(sender)
    draft = Draft(
        message_id=message_id,
        created=now,
        author=author,
        to=tuple([each for each, _ in to]),
        cc=tuple([each for each, _ in cc]),
        subject=given.subject,
        text=text,
        html=html,
        headers=tuple(each for each in headers if each[0] != "Message-ID"),
        files=files,
    )
    written = [each.mailbox for some in (to, cc, bcc) for each, _ in some]
    smtputf8 = not "".join((sender, author.mailbox, *recipients, *written)).isascii()
    mail = MailCommand(
        sender,
        body=BodyType.EIGHT_BIT if smtputf8 else BodyType.SEVEN_BIT,
        smtputf8=smtputf8,
        hold_until=hold_until,
        require_tls=given.require_tls,
    )
    return ValidatedMessage(
        envelope=envelope_of(mail, recipients),
        pointers=recipients,
        message_id=message_id,
        options=options,
        draft=draft,
    )


def envelope_of(mail: MailCommand, recipients: Iterable[Mailbox]) -> SubmittedEnvelope:
    return SubmittedEnvelope(mail, tuple(Recipient(address=each) for each in recipients))


def new_message_id(sender: str) -> str:
    domain = domain_of(Mailbox(sender))
    at = domain if domain.isascii() and domain and domain[0] != "[" else "localhost"
    return f"<{secrets.token_hex(16)}@{at}>"


_Named = tuple[Address, str]
"""An address, and the pointer to the field that names it."""


def _one(given: One, name: str, faults: FieldErrors) -> Address | None:
    with faults.at(f"/{name}"):
        if isinstance(given, str):
            return address(given, name)
        return _of_person(given, name)
    return None


def _of_person(given: Person, name: str) -> Address:
    found = address(given.email, name)
    if found.name:
        raise BadRowError(f"{name}.email must not contain a display name")
    # Parse it again with the name, because this checks the characters of the name.
    quoted = re.sub(r'(["\\])', r"\\\1", given.name)
    return address(f'"{quoted}" <{found.mailbox}>', name) if given.name else found


def _some(given: Some, name: str, faults: FieldErrors) -> list[_Named]:
    found: list[_Named] = []
    if not given and isinstance(given, tuple):
        return found
    listed = isinstance(given, tuple)
    for at, each in enumerate(given if isinstance(given, tuple) else (given,)):
        pointer, where = (f"/{name}/{at}", f"{name}[{at}]") if listed else (f"/{name}", name)
        with faults.at(pointer):
            some = addresses(each, where) if isinstance(each, str) else (_of_person(each, where),)
            found += [(one, pointer) for one in some]
    return found


def _recipients(given: Submission, named: list[_Named], faults: FieldErrors) -> dict[Mailbox, str]:
    """Return the recipients in order and without duplicates, each with the JSON pointer to its field."""
    people = named
    if given.envelope.to:
        people = []
        for at, text in enumerate(given.envelope.to):
            pointer = f"/envelope/to/{at}"
            with faults.at(pointer):
                people += [(each, pointer) for each in addresses(text, "to")]
    elif not (given.to or given.cc or given.bcc):
        faults.add("/to", "to, cc, bcc and envelope.to contain no recipient")
    found: dict[str, tuple[Mailbox, str]] = {}
    for each, pointer in people:
        found.setdefault(recipient_key(each.mailbox), (each.mailbox, pointer))
    return dict(found.values())


def _text(given: str | None, body: JsonBody, pointer: str, faults: FieldErrors) -> str | None:
    if given is None:
        return None
    long = body.long(given)
    try:
        with faults.at(pointer):
            return checked_text(given if long is None else long.text(pointer), pointer[1:])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise malformed(error) from None
    return None


def _files(
    given: Submission, body: JsonBody, uploads: Uploads, faults: FieldErrors
) -> tuple[AttachedFile, ...]:
    files = []
    if len(given.attachments) + len(uploads) > MAX_FILES:
        faults.add("/attachments", f"a message may have at most {MAX_FILES} attachments")
    for at, each in enumerate(given.attachments[:MAX_FILES]):
        name = f"attachments[{at}]"
        long = body.long(each.content)
        content = StoredBase64(long, name) if long else Base64Text(each.content.encode(), name)
        with faults.at(f"/attachments/{at}"):
            if body.refers(f"{each.filename}{each.content_type}{each.content_id}".encode()):
                raise BadRowError(f"the name or the type of {name} is too long")
            files.append(
                checked_file(AttachedFile(each.filename, each.content_type, content, each.content_id), name)
            )
    for at, upload in enumerate(uploads[:MAX_FILES], len(given.attachments)):
        with faults.at(f"/attachments/{at}"):
            files.append(checked_file(upload, f"attachments[{at}]"))
    return tuple(files)


def _options(given: Submission, origin: SubmissionOrigin, faults: FieldErrors) -> SubmitOptions:
    listener = origin.listener
    notes = [f"{TAG}{tag}" for tag in given.tags]
    for at, tag in enumerate(given.tags):
        if not _WORD.fullmatch(tag) or at >= MAX_TAGS:
            faults.add(f"/tags/{at}", f"expected at most {MAX_TAGS} tags of 1 to 64 letters, digits and _.-")
    for at, (name, given_value) in enumerate(given.metadata.items()):
        value = as_text(given_value)
        if (
            not (_WORD.fullmatch(name) and value.isprintable() and len(value) <= MAX_NOTE)
            or at >= MAX_METADATA
        ):
            text = (
                f"at most {MAX_METADATA} names in the syntax of tags are allowed, with printable values "
                f"of at most {MAX_NOTE} characters"
            )
            faults.add(pointer_to("metadata", name), text)
        notes.append(f"{METADATA}{name}={value}")
    if given.zone:
        if given.zone not in {each.name for each in origin.settings.zone}:
            faults.add("/zone", "this zone does not exist")
        elif (header := ZoneHeader.of(listener)) is None or not header.trusts(origin.client, origin.user):
            faults.add("/zone", "this user may not select a zone (zone_header_users of its [[listener]])")
    return SubmitOptions(
        idempotency_key=origin.key, zone=given.zone, notes=tuple(notes), partial=given.partial
    )


def as_text(value: str | float | None) -> str:
    """Return a JSON value as text: a string unchanged, null as "", and other values as JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else msgspec.json.encode(value).decode()


def _hold_until(given: Submission, origin: SubmissionOrigin, now: float, faults: FieldErrors) -> float | None:
    if given.send_at is None:
        return None
    due = given.send_at.timestamp() if isinstance(given.send_at, datetime) else given.send_at
    if not origin.listener.max_hold or not due <= now + origin.listener.max_hold:
        faults.add("/send_at", f"must be at most {origin.listener.max_hold:.0f} seconds in the future")
    return due if due > now else None
