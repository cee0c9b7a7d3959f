"""The client side of one mail transaction: it receives replies and returns the bytes to send. No I/O.

`chunked.py` does the same with BDAT.

The caller writes what `begin` and `receive` return and reads one reply at a time until `phase` is DONE. In
BODY it sends the stuffed body and the final dot and then calls `body_sent`. `outcomes` has the result for
each recipient: in DONE always one, after any failure.

Policies:

- PIPELINING (RFC 2920): MAIL, every RCPT and DATA are one write; otherwise step by step. A server that
  answers DATA with 354 although no recipient is left gets a lone dot, whose reply does not matter.
- Only the first digit of a reply decides (RFC 5321 4.2.1), except 421 and 552.
- 421 at any time ends the session (RFC 5321 3.8). At MAIL no recipient has been asked yet, so the transaction
  is `unanswered` and may be tried on another connection; later it is a deferral.
- 452 or 552 at RCPT means too many recipients (RFC 5321 4.5.3.1.10) unless the enhanced code names another
  reason; so does any refusal there with X.5.3. If a recipient was accepted before, the rest is `overflow`,
  for a next transaction.
- A refusal of MAIL or DATA concerns every recipient of the transaction; a recipient refused at RCPT keeps
  that reply. A refusal that may be about parameters which the server offers and the message can do without
  (555, 501 and the like) is no answer: the recipients are to be asked `again` without them.
- After the final dot only the peer's reply says whether the peer is responsible: without a reply the outcome
  is a deferral `in_doubt` (RFC 1047).
- A server that offers DSN gets the client's wishes for reports (`dsn.py`), and reports success from then on
  (`Outcome.dsn_passed`). A server without DSN gets none of them.
- A reply that no command asked for, or whose code does not answer the command, means that replies and
  commands are out of step: the recipients are deferred, and the connection ends.
- The caller knows beforehand whether the peer can take this message at all (SIZE, 8BITMIME, SMTPUTF8).

Writes the commands of one transaction: MAIL with the parameters that the peer supports, DSN included, the
RCPTs, DATA.
"""

import enum
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import structs

from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import BodyType, Envelope, Mailbox, Message
from zonerelay.model.reply import Outcome, Reply, Scope, Verdict
from zonerelay.smtp.client.extensions import Capabilities
from zonerelay.smtp.client.stuffing import END
from zonerelay.smtp.server.params import MAX_ORCPT, NOTIFY

# Writes the DSN parameters of a message for a server with DSN (RFC 3461 5.2.1, RFC 6533 3). No I/O.
#
# Policy:
#
# - ENVID, RET and NOTIFY are passed on when the client gave them, and never otherwise.
# - ORCPT is passed on as it was given, in the client's case. A recipient with NOTIFY but without ORCPT gets
#   one made of its address (5.2.1 d), so that a later report names the recipient that the sender knows.
# - An ORCPT of type utf-8 stays unchanged in a transaction with SMTPUTF8. Elsewhere characters beyond ASCII
#   become `\x{HEX}`, RFC 6533's form for servers without SMTPUTF8.
#
# The parameters were checked when they arrived (`smtp/server/params.py`), so no value here can end a line.

_NOT_XTEXT = re.compile(r"[^!-*,-<>-~]")
_NOT_UTF8_XTEXT = re.compile(r"[^!-*,-<>-\[\]-~]")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")


_NOTIFY = {value: words for words, value in reversed(NOTIFY.items())}


def mail_parameters(envelope: Envelope) -> str:
    """Return the DSN parameters of MAIL, RET and ENVID, each preceded by a space."""
    ret = f" RET={envelope.ret}" if envelope.ret else ""
    return f"{ret} ENVID={envelope.envid}" if envelope.envid else ret


def rcpt_parameters(delivery: Delivery, *, smtputf8: bool) -> str:
    """Return the DSN parameters of RCPT, NOTIFY and ORCPT, each preceded by a space. With `smtputf8`, MAIL
    has the parameter SMTPUTF8.
    """
    notify = f" NOTIFY={_NOTIFY.get(delivery.notify, 'NEVER')}" if delivery.notify else ""
    orcpt = delivery.orcpt
    if not orcpt and notify:
        orcpt = original_recipient(delivery.recipient)
    if not smtputf8 and not orcpt.isascii():
        orcpt = _NOT_ASCII.sub(_embedded, orcpt)
    return f"{notify} ORCPT={orcpt}" if orcpt else notify


def original_recipient(recipient: Mailbox) -> str:
    """Return an address as an ORCPT value, or `""` if it would be too long."""
    if recipient.isascii():
        value = "rfc822;" + _NOT_XTEXT.sub(_xtext, recipient)
    else:
        value = "utf-8;" + _NOT_UTF8_XTEXT.sub(_embedded, recipient)
    return value if len(value) <= MAX_ORCPT else ""


def _xtext(match: re.Match[str]) -> str:
    return f"+{ord(match[0]):02X}"


def _embedded(match: re.Match[str]) -> str:
    return f"\\x{{{ord(match[0]):02X}}}"


DATA = b"DATA\r\n"

_NEXT_RCPT = ">\r\nRCPT TO:<"


def script(message: Message, deliveries: Sequence[Delivery], capabilities: Capabilities) -> bytes:
    """Return the MAIL command, a RCPT command for each recipient, and the DATA command, one line each. Raise
    ValueError for a line break in an address.

    Mailboxes and DSN parameters were parsed when they arrived. Line breaks are checked once more, because one
    would let an unauthenticated client insert commands.
    """
    envelope = message.envelope
    sender, rcpts = envelope.sender, _NEXT_RCPT.join([each.recipient for each in deliveries]) + ">"
    few = capabilities.few_parameters
    parameters = f" SIZE={message.size}" if capabilities.size_offered and not few else ""
    if capabilities.eight_bit_mime and (
        message.eight_bit or (envelope.body is BodyType.EIGHT_BIT and not few)
    ):
        parameters += " BODY=8BITMIME"
    declared = needs_smtputf8(message) if few else envelope.smtputf8
    smtputf8 = capabilities.smtputf8 and (declared or not (sender.isascii() and rcpts.isascii()))
    if smtputf8:
        parameters += " SMTPUTF8"
    if envelope.require_tls and capabilities.require_tls:
        parameters += " REQUIRETLS"
    if capabilities.dsn and not few:
        if envelope.ret or envelope.envid:
            parameters += mail_parameters(envelope)
        for each in deliveries:
            if each.notify or each.orcpt:
                wishes = [f"{it.recipient}>{rcpt_parameters(it, smtputf8=smtputf8)}" for it in deliveries]
                rcpts = "\r\nRCPT TO:<".join(wishes)
                break
    commands = f"MAIL FROM:<{sender}>{parameters}\r\nRCPT TO:<{rcpts}\r\nDATA\r\n".encode()
    lines = len(deliveries) + 2
    if commands.count(b"\r") != lines or commands.count(b"\n") != lines:
        raise ValueError("an envelope address contains a line break")
    return commands


def dispensable(
    message: Message, deliveries: Sequence[Delivery], capabilities: Capabilities, command: int
) -> bool:
    """Return whether the command at this position (0 is MAIL) has parameters that can be omitted."""
    if capabilities.few_parameters:
        return False
    few = script(message, deliveries, structs.replace(capabilities, few_parameters=True))
    whole = script(message, deliveries, capabilities)
    return few.split(b"\r\n")[command] != whole.split(b"\r\n")[command]


def needs_smtputf8(message: Message) -> bool:
    """Return whether the message needs SMTPUTF8 for any recipient (RFC 6531 3.6, RFC 6532 3.2).

    The sender is beyond ASCII, or a message that was declared so has UTF-8 in its header. Of a very long
    header only the fields that the message remembers are examined.
    """
    envelope = message.envelope
    if not envelope.sender.isascii():
        return True
    return envelope.smtputf8 and not all(name.isascii() and text.isascii() for name, text in message.headers)


TOO_MANY_RECIPIENTS = "5.3"

PARAMETER_CODES = frozenset({500, 501, 502, 504, 555})
"""RFC 5321 4.2.2: syntax errors, and parameters that are not recognized or not implemented."""
PARAMETER_DETAILS = frozenset({"5.1", "5.2", "5.4"})
"""RFC 3463 3.6: invalid command, syntax error, invalid arguments."""


class TransactionPhase(enum.StrEnum):
    """The command whose reply is expected next; the value completes "connection lost during …"."""

    MAIL = "MAIL"
    RCPT = "RCPT"
    DATA = "DATA"
    BODY = "the message body"
    FINAL_DOT = "the reply to the final dot"
    LONE_DOT = "the reply to the final dot of an empty message"
    FIRST_CHUNK = "the first BDAT"
    LAST_CHUNK = "the reply to the last BDAT"
    RSET = "RSET"
    DONE = "nothing"


class BdatFailure(enum.StrEnum):
    """The reason why DATA is used instead of BDAT for a host for some time."""

    UNKNOWN = "the server offers CHUNKING but does not support BDAT"
    UNANSWERED = "the server did not reply to BDAT, or the connection was lost"
    REFUSED = "the server rejected a BDAT; with DATA the connection stays usable after a rejection"
    SURPLUS = "the server sent an unsolicited reply"


class Peer(msgspec.Struct, frozen=True):
    """The host to which a message is sent: MX host name, address and port, TLS version (`""` in clear
    text).
    """

    host: str = ""
    address: str = ""
    tls: str = ""


def too_large(message: Message, capabilities: Capabilities) -> Reply | None:
    """Return a refusal if the message exceeds the limit that the peer has announced with SIZE (RFC 1870 6.1),
    or `None`.
    """
    if capabilities.size is None or message.size <= capabilities.size:
        return None
    limit = f"the peer's limit of {capabilities.size}"
    return Reply(552, "3.4", f"the message has {message.size} bytes, which exceeds {limit}")


class ClientTransaction:
    """The client side of one transaction, which sends a message to one peer for at least one delivery."""

    bdat_taken = False
    """True when a BDAT was answered with 2yz: the server knows it."""

    def __init__(
        self, message: Message, deliveries: Sequence[Delivery], capabilities: Capabilities, peer: Peer
    ) -> None:
        self.phase = TransactionPhase.MAIL
        self.closing = False
        """True when the connection must not be used any more."""
        self.unanswered = False
        """True when the session ended before MAIL was answered: no recipient has been asked."""
        self.delivered = False
        self.refused_at: TransactionPhase | None = None
        """The phase whose refusal, 421 included, left no recipient: MAIL, RCPT (all of them), DATA (the first
        BDAT, too), LAST_CHUNK (a BDAT that was the only one) or FINAL_DOT.
        """
        self.refusal: Reply | None = None
        """The reply that `refused_at` was answered with, the last one of several."""
        self.bdat_failure: BdatFailure | None = None
        self.parameters_refused = False
        """True when parameters that the message can do without were refused, as it seems."""
        self.again = False
        """True when recipients without an outcome are to be asked once more, on this connection."""
        self.overflow: list[int] = []
        self.outcomes: list[Outcome | None] = [None] * len(deliveries)
        """The result of each recipient. `None` before DONE, for those in `overflow` and those to ask
        `again`.
        """
        self._peer = peer
        self._pipelining = capabilities.pipelining
        self._dsn = capabilities.dsn and not capabilities.few_parameters
        self._message, self._deliveries, self._capabilities = message, deliveries, capabilities
        self._script = script(message, deliveries, capabilities)
        self._commands = [] if self._pipelining else self._script.splitlines(keepends=True)
        self._asked = 0
        self._accepted: list[int] = []
        self._mail_refused = False

    def begin(self) -> bytes:
        """Return the first bytes to send: all commands if the peer supports pipelining, otherwise MAIL."""
        return self._script if self._pipelining else self._commands[0]

    def receive(self, reply: Reply) -> bytes:
        """Process the reply to the oldest unanswered command. Return the next bytes to send, if any."""
        if reply.code >= 300:
            if reply.code == 421:
                return self._session_ends(reply)
            if reply.code < 400 and self.phase not in _MAY_BE_3YZ:
                return self._confused(reply)
        return self._on_reply[self.phase](self, reply)

    def body_sent(self) -> None:
        """Record that the final dot was sent; the outcome now depends on the peer's reply."""
        self.phase = TransactionPhase.FINAL_DOT

    def lost(self, reply: Reply, *, skipped: bool = False) -> None:
        """End the transaction because the connection failed. `reply` is the relay's own; recipients without a
        final reply are deferred. Lines that were `skipped` may have been the missing replies.
        """
        if skipped and self.phase in (TransactionPhase.RCPT, TransactionPhase.DATA):
            self._forget_refusals()
        self._end(reply, local=True)

    def surplus(self, reply: Reply | None) -> None:
        """End the transaction because the peer sent an unexpected `reply`.

        421 is not unexpected, because a server may send it at any time (RFC 5321 3.8).
        """
        self.closing = True
        if reply is None or reply.code != 421:
            self.bdat_failure = BdatFailure.SURPLUS
            if self.phase is not TransactionPhase.DONE:
                self._out_of_step(f"an unsolicited reply during {self.phase}")
        elif self.phase is not TransactionPhase.DONE:
            self._session_ends(reply)

    def abandon(self, reply: Reply) -> None:
        """End the transaction after an internal error within the body, without completing the message."""
        self.closing = True
        self._settle(self._waiting(), reply, Verdict.DEFERRED, Scope.LOCAL, local=True, counts=False)
        self.phase = TransactionPhase.DONE

    # One method per phase takes its replies.

    def _on_mail(self, reply: Reply) -> bytes:
        if reply.code >= 400:
            self._mail_refused = True
            if not self._is_about_parameters(0, reply):
                self._refused(TransactionPhase.MAIL, reply)
                self._refuse(range(len(self.outcomes)), reply, Scope.MESSAGE)
            if not self._pipelining:
                self.phase = TransactionPhase.DONE
                return b""
        self.phase = TransactionPhase.RCPT
        return b"" if self._pipelining else self._commands[1]

    def _on_rcpt(self, reply: Reply) -> bytes:
        index = self._asked
        self._asked = index + 1
        if not self._mail_refused:
            if reply.code < 300:
                self._accepted.append(index)
            elif not self._is_about_parameters(index + 1, reply):
                self._not_accepted(index, reply)
        if self._asked == len(self.outcomes):
            if not (self._accepted or self._mail_refused or self.again):
                self._refused(TransactionPhase.RCPT, reply)
            return self._envelope_answered()
        return b"" if self._pipelining else self._commands[self._asked + 1]

    def _is_about_parameters(self, command: int, reply: Reply) -> bool:
        """Return whether the reply rejects optional parameters, so that the command is repeated without
        them.
        """
        about = reply.detail in PARAMETER_DETAILS or (
            reply.code in PARAMETER_CODES and not reply.detail.startswith(("1.", "7."))
        )
        if not (about and dispensable(self._message, self._deliveries, self._capabilities, command)):
            return False
        self.again = self.parameters_refused = True
        return True

    def _envelope_answered(self) -> bytes:
        """Return the bytes to send after the reply to the last RCPT."""
        if not (self._accepted or self._pipelining):
            return self._reset()
        self.phase = TransactionPhase.DATA
        return b"" if self._pipelining else DATA

    def _not_accepted(self, index: int, reply: Reply) -> None:
        if reply.detail == TOO_MANY_RECIPIENTS or (reply.code in (452, 552) and not reply.detail):
            if self._accepted:
                self.overflow.append(index)
            else:
                self._refuse((index,), Reply(452, TOO_MANY_RECIPIENTS, reply.text), Scope.RECIPIENT)
        else:
            self._refuse((index,), reply, Scope.RECIPIENT)

    def _on_data(self, reply: Reply) -> bytes:
        if reply.code < 300:
            return self._confused(reply)
        if reply.code < 400:
            self.phase = TransactionPhase.BODY if self._accepted else TransactionPhase.LONE_DOT
            return b"" if self._accepted else END
        if self._accepted:
            self._refused(TransactionPhase.DATA, reply)
        self._refuse(self._accepted, reply, Scope.MESSAGE)
        return self._finish() if self._mail_refused else self._reset()

    def _on_early_reply(self, reply: Reply) -> bytes:
        """Process a reply that arrives before the final dot was sent. The peer's position in the body is
        unknown, so the connection is not reused.
        """
        if reply.code < 400:
            return self._confused(reply)
        self.closing = True
        self._refuse(self._accepted, reply, Scope.MESSAGE)
        return self._finish()

    def _on_final_dot(self, reply: Reply) -> bytes:
        if reply.code < 300:
            self.delivered = True
            self._settle(self._accepted, reply, Verdict.DELIVERED, Scope.RECIPIENT)
        else:
            self._refused(TransactionPhase.FINAL_DOT, reply)
            self._refuse(self._accepted, reply, Scope.MESSAGE)
        return self._finish()

    def _on_reset(self, reply: Reply) -> bytes:
        self.closing = not reply.is_positive
        return self._finish()

    def _reset(self) -> bytes:
        # Servers differ in whether a refused DATA ends the transaction; RSET makes them agree.
        self.phase = TransactionPhase.RSET
        return b"RSET\r\n"

    # Ends.

    def _finish(self) -> bytes:
        self.phase = TransactionPhase.DONE
        if self.overflow and not (self.delivered or self.again):
            # No recipient was refused for good, so the attempt does not count against the rest.
            self._settle(self.overflow, _LATER, Verdict.DEFERRED, Scope.RECIPIENT, counts=False)
        return b""

    @property
    def _may_be_taken(self) -> bool:
        """Whether the whole message was sent and the peer may have accepted it, but has not replied."""
        return self.phase is TransactionPhase.FINAL_DOT

    def _refused(self, phase: TransactionPhase, reply: Reply) -> None:
        self.refused_at, self.refusal = phase, reply

    def _session_ends(self, reply: Reply) -> bytes:
        if self.refused_at is None and self.phase in (TransactionPhase.MAIL, TransactionPhase.RCPT):
            self._refused(self.phase, reply)
        elif self.phase in (TransactionPhase.DATA, TransactionPhase.FIRST_CHUNK):
            self._refused(TransactionPhase.DATA, reply)
        self._end(reply, local=False)
        return b""

    def _confused(self, reply: Reply) -> bytes:
        self._forget_refusals()
        self._out_of_step(f"unexpected reply during {self.phase}: {reply}")
        return b""

    def _out_of_step(self, text: str) -> None:
        """End the transaction, because replies no longer match the commands."""
        self.bdat_failure = BdatFailure.SURPLUS
        if self._accepted:
            self._forget_refusals()
        self._end(Reply(451, "5.0", text), local=True)

    def _forget_refusals(self) -> None:
        """Discard the replies to RCPT, which may belong to other recipients, so that none is bounced."""
        if not self._may_be_taken:
            self.outcomes = [None] * len(self.outcomes)
            self.overflow = []
            self.refused_at = None

    def _end(self, reply: Reply, *, local: bool) -> None:
        self.closing = True
        in_doubt = local and self._may_be_taken  # 421 is a reply
        self.unanswered = self.phase is TransactionPhase.MAIL and not in_doubt
        self._settle(
            self._waiting(),
            reply,
            Verdict.DEFERRED,
            Scope.HOST if self.unanswered else Scope.MESSAGE,
            local=local,
            in_doubt=in_doubt,
        )
        self._finish()

    def _waiting(self) -> list[int]:
        overflow = set(self.overflow)
        return [i for i, known in enumerate(self.outcomes) if known is None and i not in overflow]

    def _refuse(self, indices: Sequence[int], reply: Reply, scope: Scope) -> None:
        verdict = Verdict.BOUNCED if reply.is_permanent else Verdict.DEFERRED
        self._settle(indices, reply, verdict, scope)

    def _settle(
        self,
        indices: Sequence[int],
        reply: Reply,
        verdict: Verdict,
        scope: Scope,
        *,
        local: bool = False,
        in_doubt: bool = False,
        counts: bool = True,
    ) -> None:
        peer = self._peer
        outcome = Outcome(
            verdict, reply, scope, peer.host, peer.address, peer.tls, local, in_doubt, counts, self._dsn
        )
        if len(indices) == len(self.outcomes):
            self.outcomes = [outcome] * len(indices)
            return
        for index in indices:
            self.outcomes[index] = outcome

    _on_reply: ClassVar[
        dict[TransactionPhase, Callable[[Any, Reply], bytes]]
    ] = {  # Any: subclasses add their own
        TransactionPhase.MAIL: _on_mail,
        TransactionPhase.RCPT: _on_rcpt,
        TransactionPhase.DATA: _on_data,
        TransactionPhase.BODY: _on_early_reply,
        TransactionPhase.FINAL_DOT: _on_final_dot,
        TransactionPhase.LONE_DOT: lambda self, _: self._finish(),
        TransactionPhase.RSET: _on_reset,
    }


_MAY_BE_3YZ = (TransactionPhase.DATA, TransactionPhase.LONE_DOT, TransactionPhase.RSET)
_LATER = Reply(452, TOO_MANY_RECIPIENTS, "too many recipients for one transaction")


# The client's half of one mail transaction with BDAT (RFC 3030), for a body of one piece. No I/O.
#
# It differs from `ClientTransaction` in how the content goes. Nothing of it is sent before the last RCPT is
# answered: a server that refuses a chunk and does not consume its bytes would run the lines of the body as
# commands.
#
# - First MAIL and the RCPTs, in one write with PIPELINING. If no recipient is accepted, RSET follows.
# - On a connection that has not taken a BDAT yet the first byte goes alone, as a chunk of its own (`BDAT
#   1`). So no body is sent to a server that offers CHUNKING without knowing BDAT. One byte that is no line
#   end is no command.
# - Then the rest is one chunk, the last. A body with several chunks in flight would go on behind a refused
#   one, so larger bodies go with DATA.
#
# Policies:
#
# - A message is in doubt when the connection is lost after its last byte was written and before the reply,
#   as after the final dot. 421 is a reply, to any command.
# - Servers consume the bytes of a chunk that they refuse (RFC 3030 2), but some do not. So the connection
#   ends at once when the last chunk is refused, and the host gets DATA from then on, which keeps the
#   connection after a refusal.
# - When the first byte gets 500 to 504, the server does not know BDAT. After RSET the accepted recipients
#   are to be asked `again`, with DATA. Such a server may have kept the byte for the beginning of the next
#   command; a RSET that it did not understand is sent again.


def can_be_chunked(head: bytes) -> bool:
    """Return whether the first byte of the body can be sent as a BDAT chunk of its own: it is a visible ASCII
    character.
    """
    return b"!" <= head[:1] <= b"~"


class ChunkedTransaction(ClientTransaction):
    """The client side of one transaction that sends the body with BDAT. `content` is the whole body (with its
    line ends checked by `stuffing.py`). With `probe`, its first byte is sent as a chunk of its own.
    """

    def __init__(
        self,
        message: Message,
        deliveries: Sequence[Delivery],
        capabilities: Capabilities,
        peer: Peer,
        *,
        content: bytes,
        probe: bool,
    ) -> None:
        super().__init__(message, deliveries, capabilities, peer)
        self._content = content
        self._probe = probe
        self._octet_unread = False
        self._script = self._script.removesuffix(DATA)

    def lost(self, reply: Reply, *, skipped: bool = False) -> None:
        if self.phase in (TransactionPhase.FIRST_CHUNK, TransactionPhase.LAST_CHUNK):
            self.bdat_failure = BdatFailure.UNANSWERED
        super().lost(reply, skipped=skipped)

    def _session_ends(self, reply: Reply) -> bytes:
        if self.phase is TransactionPhase.LAST_CHUNK and not self._probe:
            self._refused(self.phase, reply)
        return super()._session_ends(reply)

    @property
    def _may_be_taken(self) -> bool:
        return self.phase is TransactionPhase.LAST_CHUNK

    def _envelope_answered(self) -> bytes:
        if not self._accepted:
            return self._reset()
        if not self._probe:
            return self._last_chunk(self._content)
        self.phase = TransactionPhase.FIRST_CHUNK
        return b"BDAT 1\r\n" + self._content[:1]

    def _last_chunk(self, content: bytes) -> bytes:
        self.phase = TransactionPhase.LAST_CHUNK
        return b"BDAT %d LAST\r\n%b" % (len(content), content)

    def _on_first_chunk(self, reply: Reply) -> bytes:
        if reply.code < 300:
            self.bdat_taken = True
            return self._last_chunk(self._content[1:])
        if 500 <= reply.code <= 504:
            self.bdat_failure = BdatFailure.UNKNOWN
        else:
            self._refused(TransactionPhase.DATA, reply)
            self._refuse(self._accepted, reply, Scope.MESSAGE)
        self._octet_unread = True
        return self._reset()

    def _on_last_chunk(self, reply: Reply) -> bytes:
        answer = self._on_final_dot(reply)
        if self.delivered:
            self.bdat_taken = True
        else:
            self.closing = True
            self.bdat_failure = BdatFailure.REFUSED
            self.refused_at = TransactionPhase.FINAL_DOT if self._probe else TransactionPhase.LAST_CHUNK
        return answer

    def _on_reset(self, reply: Reply) -> bytes:
        if reply.is_permanent and self._octet_unread:
            self._octet_unread = False
            return self._reset()
        unknown = self.bdat_failure is BdatFailure.UNKNOWN
        self.again = (unknown or self.parameters_refused) and reply.is_positive
        if unknown and not self.again:
            text = "the server offers CHUNKING but does not support BDAT"
            later = Reply(451, "5.1", text)
            self._settle(self._accepted, later, Verdict.DEFERRED, Scope.MESSAGE, local=True, counts=False)
        return super()._on_reset(reply)

    _on_reply: ClassVar[dict[TransactionPhase, Callable[[Any, Reply], bytes]]] = {
        **ClientTransaction._on_reply,
        TransactionPhase.FIRST_CHUNK: _on_first_chunk,
        TransactionPhase.LAST_CHUNK: _on_last_chunk,
        TransactionPhase.RSET: _on_reset,
    }
