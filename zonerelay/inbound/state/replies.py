"""The SMTP replies of the server, each encoded once.

Each reply except the greeting, the EHLO list and 354 has an enhanced status code (RFC 2034). Texts are
generic; details for the operator are logged. `counts` marks a client's error, which counts towards
`max_errors`. Our own failures, and limits that a correct client may reach, do not count.

The module also builds the greeting of a listener and its replies to EHLO and HELO, each once.

An extension is offered only if it is fully implemented and useful for this client: STARTTLS and AUTH depend
on the connection, and DSN, FUTURERELEASE and XCLIENT on the client.
"""

import enum

import msgspec
from msgspec import structs

from zonerelay.config.settings import ListenerSettings
from zonerelay.config.units import format_size
from zonerelay.inbound.refusal import Reason, Refusal
from zonerelay.model.envelope import MessageId
from zonerelay.model.reply import Reply
from zonerelay.smtp.client.extensions import future_release_line, limits_line
from zonerelay.smtp.server import sasl
from zonerelay.smtp.server.proxy_protocol import KEYWORDS
from zonerelay.smtp.server.sasl import MECHANISMS


class NextAction(enum.Enum):
    """What the session does after a reply."""

    GO_ON = enum.auto()
    TAKE_BODY = enum.auto()
    TAKE_CHUNK = enum.auto()  # read the bytes of a BDAT, then send the reply about them
    DISCARD = enum.auto()  # discard the bytes of a refused BDAT, then send `later`
    HANDSHAKE = enum.auto()  # start TLS
    ASK = enum.auto()  # ask the question, then reply
    READMIT = enum.auto()  # count the connection as one of the client that XCLIENT names
    CLOSE = enum.auto()


class ServerReply(msgspec.Struct, frozen=True):
    """An SMTP reply of the server in wire format, with the action that follows it. A reply with a `reason` is
    a refusal, which is logged and counted. The log has `reply`; the client gets `detailed` if that is set.
    """

    reply: Reply
    wire: bytes
    then: NextAction = NextAction.GO_ON
    reason: Reason | None = None
    counts: bool = False
    later: bytes = b""
    detailed: Reply | None = None
    retry_after: float = 0.0

    @property
    def refusal(self) -> Refusal:
        assert self.reason is not None
        return Refusal(self.reason, self.detailed or self.reply, self.retry_after)


MAX_DRAINED = 1024 * 1024  # bytes beyond twice the size limit before the connection is closed

_LAST_WORD = 421  # RFC 5321 3.8: the server closes

_OURS = {
    Reason.AUTH_FAILURE, Reason.BEING_STORED, Reason.LOCAL_ERROR, Reason.LOOP, Reason.MEMORY, Reason.POLICY,
    Reason.QUOTA, Reason.RECIPIENTS, Reason.SENDER_DOMAIN, Reason.SHUTDOWN, Reason.STORE, Reason.STORE_FULL,
    Reason.SUSPENDED, Reason.USER,
}  # fmt: skip


def said(code: int, detail: str, text: str, then: NextAction = NextAction.GO_ON) -> ServerReply:
    reply = Reply(code, detail, text)
    return ServerReply(reply, reply.encode(), then)


def refused(reply: Reply, reason: Reason, then: NextAction = NextAction.GO_ON) -> ServerReply:
    return ServerReply(reply, reply.encode(), then, reason, reason not in _OURS)


def in_detail(answer: ServerReply, text: str) -> ServerReply:
    """Return a refusal with a longer text for the client. Logs, history and counters have the short text."""
    detailed = Reply(answer.reply.code, answer.reply.detail, text)
    return structs.replace(answer, wire=detailed.encode(), detailed=detailed)


def decided(reply: Reply, reason: Reason) -> ServerReply:
    """Return the refusal for a policy's or a lookup's negative reply. Code 421 ends the session."""
    return refused(reply, reason, NextAction.CLOSE if reply.code == _LAST_WORD else NextAction.GO_ON)


def barred(refusal: Refusal) -> ServerReply:
    """Return the reply to AUTH for a refusal by the user's limits, with the codes of RFC 4954 6."""
    reply = refusal.reply
    return refused(Reply(454 if reply.is_transient else 535, reply.detail, reply.text), Reason.USER)


def _no(code: int, detail: str, text: str, reason: Reason) -> ServerReply:
    return refused(Reply(code, detail, text), reason)


def _bye(code: int, detail: str, text: str, reason: Reason) -> ServerReply:
    return refused(Reply(code, detail, text), reason, NextAction.CLOSE)


_REASONS = {"5.4": Reason.PARAMETER, "6.7": Reason.SMTPUTF8, "1.3": Reason.ADDRESS, "1.7": Reason.ADDRESS}


def bad_command(reply: Reply) -> ServerReply:
    """Return the refusal for a command that the parser has rejected."""
    return refused(reply, _REASONS.get(reply.detail, Reason.SYNTAX))


def queued(message_id: MessageId) -> bytes:
    """Return the reply 250 for an accepted message."""
    return f"250 2.0.0 OK queued as {message_id}\r\n".encode()


def chunk_taken(size: int) -> bytes:
    return f"250 2.0.0 {size} octets received\r\n".encode()


def too_big(limit: int) -> ServerReply:
    return in_detail(TOO_BIG, f"Message exceeds {format_size(limit)}, the limit of this listener")


def much_too_big(limit: int) -> ServerReply:
    return in_detail(MUCH_TOO_BIG, f"Message exceeds {format_size(limit)}, the limit of this listener")


def header_too_big(limit: int) -> ServerReply:
    return in_detail(HEADER_TOO_BIG, f"Message header exceeds {format_size(limit)}")


def too_many_recipients(limit: int) -> ServerReply:
    return in_detail(TOO_MANY_RECIPIENTS, f"More than {limit} recipients; send the rest in another message")


def relaying_denied(client: str, *, may_log_in: bool) -> ServerReply:
    """Return the refusal of relaying, with the client's address as the relay sees it, for the operator's
    configuration.
    """
    lacks = "not authenticated, and not in an allowed network" if may_log_in else "not in an allowed network"
    return in_detail(RELAYING_DENIED, f"Relaying denied for {client}: {lacks}") if client else RELAYING_DENIED


_NOTHING = Reply(250, "0.0", "")

# These are not sent: the real reply follows later.
ASK = ServerReply(_NOTHING, b"", NextAction.ASK)
TAKE_CHUNK = ServerReply(_NOTHING, b"", NextAction.TAKE_CHUNK)
READMIT = ServerReply(_NOTHING, b"", NextAction.READMIT)

OK = said(250, "0.0", "OK")
SENDER_OK = said(250, "1.0", "Sender OK")
RECIPIENT_OK = said(250, "1.5", "Recipient OK")
START_TLS = said(220, "0.0", "Ready to start TLS", NextAction.HANDSHAKE)
AUTH_OK = said(235, "7.0", "Authentication succeeded")
START_BODY = said(354, "", "End data with <CR><LF>.<CR><LF>", NextAction.TAKE_BODY)
CANNOT_VERIFY = said(252, "5.0", "Cannot verify, but will accept message and attempt delivery")
HELP = said(214, "0.0", "See RFC 5321")
BYE = said(221, "0.0", "Bye", NextAction.CLOSE)

EHLO_FIRST = _no(503, "5.1", "Send EHLO first", Reason.SEQUENCE)
MAIL_FIRST = _no(503, "5.1", "Send MAIL first", Reason.SEQUENCE)
NESTED_MAIL = _no(503, "5.1", "Nested MAIL command", Reason.SEQUENCE)
NO_RECIPIENTS = _no(554, "5.1", "No valid recipients", Reason.SEQUENCE)
IN_CHUNKS = _no(503, "5.1", "The message is being sent with BDAT", Reason.SEQUENCE)
NOT_IN_TRANSACTION = _no(503, "5.1", "Not within a mail transaction", Reason.SEQUENCE)
TLS_ALREADY = _no(503, "5.1", "TLS is active already", Reason.SEQUENCE)
AUTH_ALREADY = _no(503, "5.1", "Authenticated already", Reason.SEQUENCE)
NO_ARGUMENT = _no(501, "5.4", "No argument allowed", Reason.SYNTAX)
NEEDS_ARGUMENT = _no(501, "5.4", "Argument required", Reason.SYNTAX)
UNKNOWN = _no(500, "5.1", "Command not recognized", Reason.UNKNOWN_COMMAND)
NOT_OFFERED = _no(502, "5.1", "Command not implemented", Reason.NOT_OFFERED)
RESPONSE_TOO_LONG = refused(sasl.LINE_TOO_LONG, Reason.SYNTAX)
LINE_TOO_LONG = _no(500, "5.2", "Line too long", Reason.SYNTAX)

TLS_FIRST = _no(530, "7.0", "Issue STARTTLS first", Reason.TLS_NEEDED)
AUTH_FIRST = _no(530, "7.0", "Authentication required", Reason.AUTH_NEEDED)
AUTH_NEEDS_TLS = _no(538, "7.11", "Encryption required for authentication", Reason.TLS_NEEDED)
AUTH_FAILED = _no(535, "7.8", "Authentication credentials invalid", Reason.AUTH)
AUTH_LOCKED = _no(454, "7.0", "Too many failed attempts, try again later", Reason.AUTH)
AUTH_FAILURE = _no(454, "7.0", "Temporary authentication failure", Reason.AUTH_FAILURE)
NOT_YOUR_ADDRESS = _no(553, "7.1", "Sender address not allowed for this user", Reason.SENDER)
FROM_NOT_YOURS = _no(550, "7.1", "From address not allowed for this user", Reason.SENDER)
TOO_FAR_AHEAD = _no(501, "5.4", "Release time is too far in the future", Reason.PARAMETER)

RELAYING_DENIED = _no(550, "7.1", "Relaying denied", Reason.RELAY)
PERCENT_ROUTE = _no(553, "1.3", "Routing by percent sign is not supported", Reason.ADDRESS)
NOT_OF_OURS = _no(550, "1.1", "No such address", Reason.SRS)
TOO_MANY_GUESSES = _no(451, "7.0", "Too many wrong addresses, try again later", Reason.SRS_GUESSES)
TOO_MANY_RECIPIENTS = _no(452, "5.3", "Too many recipients", Reason.RECIPIENTS)
TOO_BIG = _no(552, "3.4", "Message too big", Reason.SIZE)
HEADER_TOO_BIG = _no(552, "3.4", "Message header too big", Reason.HEADER_SIZE)
BARE_LINE_ENDS = _no(550, "6.0", "Bare <CR> or <LF> in message", Reason.BARE_LINE_ENDS)
HEADER_CONTROLS = _no(550, "6.0", "Control character in the header", Reason.HEADER_CONTROLS)
BAD_KEY = _no(
    554,
    "6.0",
    "Idempotency-Key must be a single field of 1 to 255 visible ASCII characters",
    Reason.IDEMPOTENCY_KEY,
)
OTHER_CONTENT = _no(
    550,
    "6.0",
    "Another message to these recipients was accepted with this idempotency key, use a new key",
    Reason.IDEMPOTENCY,
)
BEING_STORED = _no(
    451, "3.0", "A message with this idempotency key may already be stored, try again", Reason.BEING_STORED
)
MAIL_LOOP = _no(554, "4.6", "Too many Received fields: mail loop", Reason.LOOP)
STORE_FULL = _no(452, "3.1", "Insufficient system storage", Reason.STORE_FULL)
STORE_FAILURE = _no(451, "3.0", "Cannot store the message now", Reason.STORE)
LOCAL_ERROR = _no(451, "3.0", "Local error, try again later", Reason.LOCAL_ERROR)

MUCH_TOO_BIG = _bye(552, "3.4", "Message too big", Reason.SIZE)
BARE_LF_COMMAND = _bye(500, "5.2", "Command lines end with <CR><LF>", Reason.SYNTAX)
PIPELINED = _bye(554, "5.0", "Input sent before the reply", Reason.PIPELINING)
NOT_SMTP = _bye(554, "5.0", "This is SMTP", Reason.OTHER_PROTOCOL)
TOO_MANY_CONNECTIONS = _bye(421, "3.2", "Too many connections", Reason.CONNECTIONS)
TOO_MANY_FROM_CLIENT = _bye(421, "7.0", "Too many connections from you", Reason.CLIENT_CONNECTIONS)
TOO_MANY_FROM_NETWORK = _bye(421, "7.0", "Too many connections from your network", Reason.NETWORK_CONNECTIONS)
TOO_MUCH_MEMORY = _bye(421, "3.2", "Too busy, try again later", Reason.MEMORY)
TOO_MANY_LOGINS = _bye(421, "7.0", "Too many failed logins", Reason.AUTH)
TOO_MANY_COMMANDS = _bye(421, "7.0", "Too many commands", Reason.COMMANDS)
TOO_MANY_ERRORS = _bye(421, "7.0", "Too many errors", Reason.ERRORS)
IDLE = _bye(421, "4.2", "Timeout waiting for the client", Reason.IDLE)
TRANSACTION_TIME = _bye(421, "4.2", "Transaction took too long", Reason.TRANSACTION_TIME)
DATA_RATE = _bye(421, "4.2", "Data comes too slowly", Reason.DATA_RATE)
SUSPENDED = _bye(421, "3.2", "Service not available, try again later", Reason.SUSPENDED)
SHUTTING_DOWN = _bye(421, "3.2", "Shutting down", Reason.SHUTDOWN)

# Not sent: the log shows it for a client that disconnected during DATA.
CLIENT_LEFT = ServerReply(
    Reply(421, "4.2", "Connection lost before the end of data"), b"", reason=Reason.CLIENT_LEFT
)

# Not sent either: after a failed handshake, or before a PROXY header, the client cannot read a reply.
_UNHEARD = Reply(421, "5.0", "Not heard")
NOBODY = ServerReply(_UNHEARD, b"", NextAction.CLOSE)
TLS_FAULT = ServerReply(_UNHEARD, b"", NextAction.CLOSE, Reason.TLS)
BAD_PROXY = ServerReply(_UNHEARD, b"", NextAction.CLOSE, Reason.PROXY)
NO_PROXY = _bye(554, "5.0", "PROXY header not allowed from this address", Reason.PROXY)


FRESH = 60.0  # seconds for which an EHLO reply that contains a date (RFC 4865) is reused


# The lines of the EHLO reply that not every client gets. The first one gets its values when it is sent.
FUTURE_RELEASE = "FUTURERELEASE"
STARTTLS = "STARTTLS"
AUTH = f"AUTH {' '.join(MECHANISMS)}"
XCLIENT = f"XCLIENT {KEYWORDS}"


class Greeting:
    """The greeting and EHLO replies of a listener."""

    def __init__(self, hostname: str, settings: ListenerSettings) -> None:
        self.banner = said(220, "", f"{hostname} ESMTP")
        self.helo = said(250, "", hostname)
        self._max_hold = int(settings.max_hold)
        self._lines = (
            hostname,
            "PIPELINING",
            f"SIZE {settings.max_message_size}",
            "8BITMIME",
            "SMTPUTF8",
            "ENHANCEDSTATUSCODES",
            "CHUNKING",
            limits_line(settings.max_recipients),
        )
        self._answers: dict[tuple[str, ...], tuple[float, ServerReply]] = {}

    def ehlo(self, offer: tuple[str, ...], now: float) -> ServerReply:
        """Return the EHLO reply of the listener, with the lines in `offer`, which this client may use, at the
        end. `now` is Unix time.
        """
        known = self._answers.get(offer)
        if known is None or not known[0] <= now < known[0] + FRESH:
            release = future_release_line(self._max_hold, now)
            lines = (release if line == FUTURE_RELEASE else line for line in offer)
            known = self._answers[offer] = (now, said(250, "", "\n".join((*self._lines, *lines))))
        return known[1]
