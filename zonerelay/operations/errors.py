"""The exceptions that operations raise, each with its code for clients. Each error has a kind, from which
HTTP and the command line derive a status, and a human-readable message.
"""

import enum


class ErrorKind(enum.StrEnum):
    """The reason why an operation failed."""

    NOT_FOUND = "not_found"
    """What the request names does not exist, or no longer exists."""
    NOT_POSSIBLE = "not_possible"
    """The relay understands the request, and it cannot be done as things are."""
    INVALID = "invalid"
    """The request means nothing here; `pointer` names the field."""
    BUSY = "busy"
    """As many requests are being answered as may be: try again."""
    UNAVAILABLE = "unavailable"
    """The spool or all workers cannot answer now."""
    FORBIDDEN = "forbidden"
    """The client may not ask for it."""
    UNEXPECTED = "unexpected"
    """The relay met something that it has no words for; its log has it."""


class ControlError(Exception):
    """An operation failed; the message says what to do. `pointer` is a JSON pointer into the request."""

    kind = ErrorKind.NOT_POSSIBLE

    def __init__(self, text: str, *, pointer: str = "") -> None:
        super().__init__(text)
        self.pointer = pointer


class NotRunningError(ControlError):
    """No relay responds at the control socket."""


class AnotherRelayError(ControlError):
    """Another relay already responds at the control socket that this one would use."""


class NotFoundError(ControlError):
    """The object that the request names does not exist, or no longer exists."""

    kind = ErrorKind.NOT_FOUND


class InvalidError(ControlError):
    """A field of the request has an invalid value."""

    kind = ErrorKind.INVALID


class BusyError(ControlError):
    """Too many requests are being processed, so this one is refused."""

    kind = ErrorKind.BUSY


class UnavailableError(ControlError):
    """The spool or the workers cannot process requests now."""

    kind = ErrorKind.UNAVAILABLE


class ForbiddenError(ControlError):
    """The client is not allowed to make this request."""

    kind = ErrorKind.FORBIDDEN


class UnexpectedError(ControlError):
    """An unexpected error occurred; the details are in the relay's log."""

    kind = ErrorKind.UNEXPECTED


_BY_KIND: dict[str, type[ControlError]] = {each.kind: each for each in ControlError.__subclasses__()}
_BY_KIND[ControlError.kind] = ControlError


def error_of(code: str, detail: str, pointer: str = "") -> ControlError:
    """Convert the code and text of an error response to an exception. An unknown code is treated as an error
    of the HTTP layer.
    """
    return _BY_KIND.get(code, UnexpectedError)(detail, pointer=pointer)
