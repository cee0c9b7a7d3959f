"""Calls handlers and authenticators that were written for aiosmtpd. No other module imports aiosmtpd.

A hook gets aiosmtpd's own Session and Envelope, which are filled from the relay's events before each call.
After the call, the envelope is compared and each difference becomes a decision. A change that the relay
supports takes effect after the relay's own checks; any other change is a failure. As for every policy,
`runner` provides the threads, the time limit and the reply 451.

Policy, where aiosmtpd leaves a choice or behaves differently:

- A 2yz reply accepts. The text of the reply is the relay's, except for VRFY. A 4yz or 5yz reply refuses.
  Every other reply is a failure.
- handle_MAIL sets envelope.mail_from and handle_RCPT appends to envelope.rcpt_tos, as in aiosmtpd. A hook
  that accepts without doing so is a failure, because aiosmtpd would lose the recipient after a 250.
- handle_exception is called with an exception, and its reply is not used: an error is answered with 451.
- A hook that exceeds the time limit keeps its Session and Envelope; the next hook gets new ones.
"""

import asyncio
import copy
import inspect
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from ipaddress import ip_address
from typing import Any, TypeVar, cast

from aiosmtpd.smtp import MISSING, SMTP, AuthResult, Envelope, LoginPassword, Session

from zonerelay.inbound.policy import api
from zonerelay.inbound.policy.api import Decision, Event, FailureKind, PolicyFailure
from zonerelay.model.envelope import Recipient
from zonerelay.model.reply import Reply
from zonerelay.smtp.server.params import MailCommand

NULL = "<>"
"""The null sender in aiosmtpd."""

_KEPT = "aiosmtpd"
_REPLY = re.compile(r"([245][0-9]{2})(?:[ ]+(?:([245])\.([0-9]{1,3}\.[0-9]{1,3})(?:[ ]+|$))?([ -~]*))?")
_MECHANISM = re.compile(r"auth_[A-Z]")
_FIELDS = ("mail_from", "mail_options", "smtp_utf8", "content", "rcpt_tos", "rcpt_options")
_MAY_CHANGE: dict[type[Event], frozenset[str]] = {
    api.Mail: frozenset({"mail_from", "mail_options"}),
    api.Rcpt: frozenset({"mail_from", "rcpt_tos"}),
    api.WholeMessage: frozenset({"mail_from", "rcpt_tos", "content"}),
}
_HOOKS: dict[str, type[Event]] = {
    "handle_HELO": api.Helo,
    "handle_EHLO": api.Helo,
    "handle_MAIL": api.Mail,
    "handle_RCPT": api.Rcpt,
    **{event.step: event for event in api.HANDLER_EVENTS},
}
_NOT_ASKED = {
    "handle_AUTH": 'use authenticator = "module:callable" to check logins',
    "handle_STARTTLS": "use session.ssl, which is available in all later hooks",
    "handle_PROXY": "use proxy_networks; session.peer is then the client",
}

Hook = Callable[..., Any]  # Any: an operator's code
Asked = TypeVar("Asked", bound=Event)
Answer = TypeVar("Answer")

_NO_LOOP = cast(asyncio.AbstractEventLoop, None)


class UnusableError(ValueError):
    """A hook returned a value that the relay cannot apply. The text is for the operator."""


class Server:
    """Stands for aiosmtpd's SMTP object as the first argument of a hook, with those attributes that apply
    here.
    """

    data_size_limit = None
    enable_SMTPUTF8 = True  # noqa: N815 - aiosmtpd's name

    def __init__(self, handler: object, hostname: str, session: Session, envelope: Envelope) -> None:
        self.event_handler = handler
        self.hostname = hostname
        self.loop = session.loop
        self.session = session
        self.envelope = envelope

    __class__ = SMTP  # type: ignore[assignment]  # for isinstance checks in hooks

    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"server.{name} is not available: a hook returns its reply")


class _Dialog:
    """The Session and Envelope objects of aiosmtpd for one client. `busy` is true while a hook uses them."""

    def __init__(self) -> None:
        self.session = Session(_loop())
        self.envelope = Envelope()
        self.recipients: object = None  # those of the transaction that the envelope represents
        self.auth_data: Any = None  # Any: an operator's object
        self.busy = False

    def begin(self, client: api.ClientInfo) -> None:
        session = self.session
        session.loop = _loop()
        session.peer = _peer(client)  # type: ignore[assignment]  # asyncio's address: aiosmtpd's annotation is wrong
        session.ssl = {"version": client.tls, "certificate": client.certificate} if client.tls else None
        session.host_name = session.host_name or client.helo or None
        session.extended_smtp = client.extended
        session.authenticated = True if client.user else None
        session.auth_data = self.auth_data if client.user else None
        session._login_data = client.user or None  # type: ignore[assignment]  # aiosmtpd's setter warns

    def fill(self, recipients: Mapping[str, Recipient], mail: MailCommand) -> Envelope:
        """Return the aiosmtpd Envelope of this transaction, updated from the relay's state."""
        if recipients is not self.recipients:
            self.envelope, self.recipients = Envelope(), recipients
            self.envelope.mail_options = _options(mail.size, mail.body, mail.smtputf8)
        envelope = self.envelope
        envelope.mail_from = mail.sender or NULL
        envelope.smtp_utf8 = mail.smtputf8
        envelope.rcpt_tos = [each.address for each in recipients.values()]  # the relay may have refused some
        return envelope


class HandlerPolicy(api.Policy):
    """A policy that calls the hooks of an aiosmtpd handler. The constructor raises ValueError for unsupported
    hooks.
    """

    events = (*api.Policy.events, *api.HANDLER_EVENTS)

    def __init__(self, handler: object, context: api.PolicyContext) -> None:
        super().__init__(context)
        for name, instead in _NOT_ASKED.items():
            if hasattr(handler, name):
                raise ValueError(f"the hook {name} is not supported: {instead}")
        if mechanisms := [name for name in dir(handler) if _MECHANISM.match(name)]:
            raise ValueError(f"the hook {mechanisms[0]} is not supported: {_NOT_ASKED['handle_AUTH']}")
        self._handler = handler
        self._hooks: dict[str, Hook] = {
            name: getattr(handler, name) for name in _HOOKS if hasattr(handler, name)
        }
        if "handle_DATA" not in self._hooks and hasattr(handler, "process_message"):
            raise ValueError("process_message is deprecated in aiosmtpd; use handle_DATA")
        if not self._hooks:
            raise ValueError(f"it has no hook and would never be called; hooks are {', '.join(_HOOKS)}")
        self._lists_lines = "handle_EHLO" in self._hooks and _takes_lines(self._hooks["handle_EHLO"])
        in_loop = {_HOOKS[name] for name, hook in self._hooks.items() if _is_async(hook)}
        for name in self._hooks:
            kind = _HOOKS[name]
            setattr(self, kind.step, self._asked if kind in in_loop else _in_thread(self._asked))

    async def _asked(self, event: Event) -> Decision | PolicyFailure | None:
        name, arguments = self._named(event)
        hook = self._hooks.get(name)
        if hook is None:
            return None
        dialog = _dialog_of(event.client)
        dialog.begin(event.client)
        envelope = _before(dialog, event)
        before = {field: copy.copy(getattr(envelope, field)) for field in _FIELDS}
        dialog.busy = True
        try:
            server = Server(self._handler, self.context.hostname, dialog.session, envelope)
            status = await _called(hook, server, dialog.session, envelope, *arguments)
            return self._after(dialog, event, before, status)
        except UnusableError as error:
            _restore(envelope, before)
            return PolicyFailure(FailureKind.BAD_DECISION, f"{name}: {error}")
        except Exception as error:
            _restore(envelope, before)
            if (vrfy_reply := getattr(self._handler, "handle_exception", None)) is not None:
                await _called(vrfy_reply, error)
            raise
        finally:
            dialog.busy = False
            if isinstance(event, api.WholeMessage):
                dialog.envelope = Envelope()  # so that an idle client keeps no message in memory

    def _named(self, event: Event) -> tuple[str, tuple[object, ...]]:
        """Return the name of the hook for an event, and the hook's arguments after the envelope."""
        if isinstance(event, api.Helo):
            if not event.extended:
                return "handle_HELO", (event.name,)
            last = len(event.lines)
            lines = [f"250{'-' if at < last else ' '}{line}" for at, line in enumerate(event.lines, 1)]
            return "handle_EHLO", (event.name, lines) if self._lists_lines else (event.name,)
        if isinstance(event, api.Mail):
            options = _options(event.size, event.body, event.smtputf8)
            return "handle_MAIL", (event.sender or NULL, options)
        if isinstance(event, api.Rcpt):
            return "handle_RCPT", (event.recipient, [])
        arguments = (event.address,) if isinstance(event, api.Vrfy) else ()
        return event.step, (event.argument or None,) if isinstance(event, api.Noop) else arguments

    def _after(
        self, dialog: _Dialog, event: Event, before: dict[str, Any], status: object
    ) -> Decision | None:  # Any: values of aiosmtpd's Envelope
        envelope = dialog.envelope
        lines: tuple[str, ...] = ()
        if isinstance(event, api.Helo) and event.extended and self._lists_lines and status is not MISSING:
            lines, reply = _lines_of(status, event.lines), None
        else:
            reply = None if status is MISSING else _reply(status)
        if isinstance(event, api.Quit):
            return None
        if reply is not None and not reply.is_positive:
            _restore(envelope, before)
            return Decision(reply=reply)
        if status is MISSING and isinstance(event, api.Mail):
            envelope.mail_from = event.sender or NULL
            envelope.mail_options += _options(event.size, event.body, event.smtputf8)
        elif status is MISSING and isinstance(event, api.Rcpt):
            envelope.rcpt_tos.append(event.recipient)
        changes = _changes(event, before, envelope)
        if isinstance(event, api.Vrfy) and reply is not None:
            return api.Changes(vrfy_reply=reply)
        return api.Changes(lines=lines) if lines else changes


def authenticator_step(check: Hook, hostname: str) -> Callable[[api.PresentedLogin], object]:
    """Convert an aiosmtpd authenticator to a function that a PolicyRunner can call."""

    async def step(event: api.PresentedLogin) -> Decision | PolicyFailure:
        dialog = _dialog_of(event.client)
        dialog.begin(event.client)
        dialog.busy = True
        try:
            credentials = LoginPassword(event.user.encode(), event.password.encode())
            envelope = Envelope()
            server = Server(None, hostname, dialog.session, envelope)
            result = await _called(check, server, dialog.session, envelope, event.mechanism, credentials)
            if not isinstance(result, AuthResult):
                kind = type(result).__name__
                return PolicyFailure(FailureKind.BAD_DECISION, f"returned {kind} instead of an AuthResult")
            if result.success is True:
                dialog.auth_data = result.auth_data
                return api.ACCEPT
            reply = _reply(result.message) if result.message else WRONG
            return Decision(reply=reply if reply.is_transient else WRONG)
        except UnusableError as error:
            return PolicyFailure(FailureKind.BAD_DECISION, str(error))
        finally:
            dialog.busy = False

    return step if _is_async(check) else _in_thread(step)


WRONG = Reply(535, "7.8", "Authentication credentials invalid")


def _dialog_of(client: api.ClientInfo) -> _Dialog:
    """Return the client's `_Dialog`, or a new one if a hook that has timed out still uses the old one."""
    known = client.kept.get(_KEPT)
    if isinstance(known, _Dialog) and not known.busy:
        return known
    fresh = client.kept[_KEPT] = _Dialog()
    if isinstance(known, _Dialog):
        fresh.auth_data = known.auth_data
    return fresh


def _before(dialog: _Dialog, event: Event) -> Envelope:
    """Return the envelope to pass to the hook for this event."""
    if isinstance(event, api.Rcpt) and event.mail is not None:
        return dialog.fill(event.recipients, event.mail)
    if isinstance(event, api.WholeMessage):
        envelope = dialog.fill(event.recipients, event.mail)
        envelope.content = envelope.original_content = event.content
        dialog.recipients = None  # the transaction ends with this hook
        return envelope
    if isinstance(event, api.Helo | api.Mail | api.Rset):
        dialog.envelope, dialog.recipients = (
            Envelope(),
            event.recipients if isinstance(event, api.Mail) else None,
        )
        dialog.envelope.smtp_utf8 = isinstance(event, api.Mail) and event.smtputf8
    if isinstance(event, api.Helo):
        dialog.session.host_name, dialog.session.extended_smtp = None, event.extended
    return dialog.envelope


def _changes(event: Event, before: dict[str, Any], envelope: Envelope) -> api.Changes:
    """Return the changes that the hook made to the envelope. Raise UnusableError if one cannot be applied."""
    changed = [field for field in _FIELDS if getattr(envelope, field) != before[field]]
    may_change = _MAY_CHANGE.get(type(event), frozenset())
    for field in changed:
        if field not in may_change:
            raise UnusableError(f"it changed envelope.{field}, which has no effect here")
    sender = _sender(event, envelope) if "mail_from" in changed or isinstance(event, api.Mail) else None
    added: list[str] = []
    removed: set[str] = set()
    if isinstance(event, api.Rcpt) or "rcpt_tos" in changed:
        added, removed = _recipients(event, before["rcpt_tos"], envelope.rcpt_tos)
    content = _content(envelope.content) if "content" in changed else None
    return api.Changes(sender=sender, added=tuple(added), removed=frozenset(removed), content=content)


def _sender(event: Event, envelope: Envelope) -> str | None:
    sender: object = envelope.mail_from
    if not isinstance(sender, str) or not sender:
        raise UnusableError("it accepted the sender but left envelope.mail_from empty")
    if isinstance(event, api.Mail):
        given = _options(event.size, event.body, event.smtputf8)
        if envelope.mail_options and envelope.mail_options != given:
            raise UnusableError("it changed envelope.mail_options, which has no effect")
        if sender == (event.sender or NULL):
            return None
    return "" if sender == NULL else sender


def _recipients(event: Event, before: list[str], now: object) -> tuple[list[str], set[str]]:
    """Return the recipients that the hook added and those that it removed."""
    if not isinstance(now, list) or not all(isinstance(each, str) for each in now):
        raise UnusableError("envelope.rcpt_tos is no longer a list of addresses")
    expected = [*before, event.recipient] if isinstance(event, api.Rcpt) else before
    if now == expected:
        return [], set()
    wanted, known = dict.fromkeys(now), set(expected)
    added, removed = [each for each in wanted if each not in known], known - wanted.keys()
    if isinstance(event, api.Rcpt) and event.recipient in removed and not added:
        raise UnusableError("it accepted the recipient but did not append it to envelope.rcpt_tos")
    if not wanted:
        raise UnusableError("it accepted the message but left envelope.rcpt_tos empty")
    return added, removed


def _content(content: object) -> bytes:
    """Return the message that the hook returned, with CRLF line ends. Python's messages have LF line ends."""
    if isinstance(content, str):
        content = content.encode("utf-8", "surrogateescape")
    if not isinstance(content, bytes | bytearray):
        raise UnusableError(f"envelope.content is of type {type(content).__name__}, not bytes or str")
    return bytes(content).replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")


def _reply(status: object) -> Reply:
    """Convert the status text that a hook returned to a reply. Raise UnusableError if it is invalid."""
    text = status.decode("ascii", "replace") if isinstance(status, bytes) else status
    if not isinstance(text, str):
        raise UnusableError(f"it returned {type(status).__name__} instead of a reply such as '250 OK'")
    found = _REPLY.fullmatch(text)
    if found is None or (found[2] and found[2] != text[0]):
        raise UnusableError(f"it returned {text[:80]!r}; a reply is a line of ASCII, such as '550 5.7.1 No'")
    reply = Reply(int(found[1]), found[3] or "0.0", found[4] or ("OK" if text[0] == "2" else "Refused"))
    if not reply.is_positive:
        try:
            Decision(reply=reply)
        except ValueError as error:
            raise UnusableError(f"it returned {text[:80]!r}: {error}") from error
    return reply


def _lines_of(status: object, given: Sequence[str]) -> tuple[str, ...]:
    """Return the lines of the EHLO reply that the hook kept, or an empty tuple if it kept all. Raise
    UnusableError if the list is invalid.
    """
    if not isinstance(status, list) or not all(isinstance(each, str) for each in status):
        raise UnusableError("it did not return the list of reply lines")
    lines = tuple(each[4:] for each in status)
    if lines[:1] != tuple(given[:1]) or not set(lines) <= set(given):
        raise UnusableError("it changed or added a line; a hook may only remove lines after the first")
    return lines if lines != tuple(given) else ()


def _takes_lines(hook: Hook) -> bool:
    """Return whether handle_EHLO has the form with five arguments, the last of which is the list of reply
    lines. Raise ValueError if it has neither form.
    """
    count = len(inspect.signature(hook).parameters)
    if count not in (4, 5):
        raise ValueError("handle_EHLO takes (server, session, envelope, hostname, responses)")
    return count == 5


def _options(size: int, body: str, smtputf8: bool) -> list[str]:
    """Return the MAIL parameters as aiosmtpd represents them, as far as it supports them."""
    size_given = [f"SIZE={size}"] if size else []
    return [*size_given, *([f"BODY={body}"] if body != "7BIT" else []), *(["SMTPUTF8"] if smtputf8 else [])]


def _peer(client: api.ClientInfo) -> tuple[object, ...] | str:
    if not client.address:
        return ""
    is_ipv6 = ip_address(client.address).version == 6
    return (client.address, client.port, 0, 0) if is_ipv6 else (client.address, client.port)


def _restore(envelope: Envelope, before: Mapping[str, Any]) -> None:  # Any: values of an Envelope
    """Undo a hook's changes to the envelope, because it did not accept the command."""
    for field, value in before.items():
        setattr(envelope, field, value)


def _is_async(hook: Hook) -> bool:
    return inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(getattr(hook, "__call__", None))  # noqa: B004


def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop in which an `async def` hook runs. The thread of a `def` hook has none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return _NO_LOOP


async def _called(hook: Hook, *arguments: object) -> object:
    result = hook(*arguments)
    if not inspect.isawaitable(result):
        return result
    # A `def` hook may return a coroutine, and handle_exception may be one.
    return await result if _loop() is not _NO_LOOP else asyncio.run(_awaited(result))


async def _awaited(result: Awaitable[object]) -> object:
    return await result


def _in_thread(
    step: Callable[[Asked], Coroutine[Any, Any, Answer]],  # Any: asyncio's own words
) -> Callable[[Asked], Answer]:
    """Convert a coroutine function that awaits nothing to a function that the runner calls in a thread."""

    def step_in_thread(event: Asked) -> Answer:
        try:
            step(event).send(None)
        except StopIteration as done:
            answer: Answer = done.value
            return answer
        raise RuntimeError("a hook that runs in a thread cannot wait for the event loop")

    return step_in_thread
