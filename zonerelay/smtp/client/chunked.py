"""The client's half of one mail transaction with BDAT (RFC 3030). No I/O.

It differs from `Transaction` in how the content goes:

- Usually the first octet goes alone, as a chunk of its own (`BDAT 1`), in one write with MAIL and the RCPTs.
  Its reply serves as the 354 of DATA, for as many round trips. Then (phase CHUNKS) the caller writes what
  `chunk` makes of the rest. So no body is sent for refused recipients, nor to a server that offers CHUNKING
  without knowing BDAT, which would run the body's lines as commands. One octet that is no line end is no
  command.
- At once, when the caller knows that the server takes BDAT: everything is one write. The message is complete
  before MAIL is answered, so every recipient without an answer is in doubt from the beginning, and no other
  host may be asked instead. Without PIPELINING nothing goes at once.

Policies:

- A message is in doubt when the connection is lost after its last octet was written and before the reply, as
  after the final dot. 421 is a reply, to any command.
- Servers consume the octets of a chunk that they refuse (RFC 3030 2), so a refused chunk does not close the
  connection: the replies to chunks in flight are read, then RSET is sent. Those replies, a 250 included,
  change nothing.
- When the first BDAT gets 500 to 504 although a recipient was accepted, the server does not know BDAT.
  `unknown` is true, and after RSET the accepted recipients are to be asked `again`, with DATA. Such a server
  may have kept the octet for the beginning of the next command; a RSET that it did not understand is sent
  again.
- When all RCPTs are refused, each keeps its reply, whatever BDAT is answered with. There is no lone dot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.model.outcome import Scope, Verdict
from zonerelay.model.reply import Reply
from zonerelay.smtp.client.extensions import Capabilities
from zonerelay.smtp.client.script import DATA
from zonerelay.smtp.client.transaction import Peer, Phase, Transaction


def can_be_chunked(head: bytes) -> bool:
    """True when the first octet of the body can go alone: no line end, no blank, no control character."""
    return b"!" <= head[:1] <= b"~"


class ChunkedTransaction(Transaction):
    """`content` is the whole message in its final form when it goes `at_once`; else its first octet."""

    def __init__(
        self,
        message: Message,
        deliveries: Sequence[Delivery],
        capabilities: Capabilities,
        peer: Peer,
        *,
        content: bytes,
        at_once: bool,
    ) -> None:
        super().__init__(message, deliveries, capabilities, peer)
        self.bdat_taken = False
        """True when a BDAT was answered with 2yz: the server knows it."""
        self.unknown = False
        """True when BDAT was answered like an unknown command."""
        self.unanswered_chunks = 0
        """Chunks that were written and not answered, without the first and the last."""
        self._octet_unread = False
        self._complete = self.at_once = last = at_once and self._pipelining
        self._after_rcpt = Phase.LAST_CHUNK if last else Phase.FIRST_CHUNK
        if not last:
            content = content[:1]
        command = _bdat(content, last=last)
        if self._pipelining:
            self._script = self._script[: -len(DATA)] + command + content
        else:
            self._commands[-1] = command + content

    def chunk(self, content: bytes, *, last: bool) -> bytes:
        """In CHUNKS, returns what to write for the next octets, of which there is at least one."""
        if last:
            self.phase = Phase.LAST_CHUNK
            self._complete = True
        else:
            self.unanswered_chunks += 1
        return _bdat(content, last=last) + content

    @property
    def _may_be_taken(self) -> bool:
        return self._complete

    def _on_first_chunk(self, reply: Reply) -> bytes:
        kind = reply.code // 100
        if kind == 3:
            return self._confused(reply)
        if kind == 2:
            self.bdat_taken = True
            if self._accepted:
                self.phase = Phase.CHUNKS
                return b""
        elif 500 <= reply.code <= 504 and self._accepted:
            self.unknown = True
        else:
            if self._accepted:
                self._refused(Phase.DATA, reply)
            self._refuse(self._accepted, reply, Scope.MESSAGE)
        self._octet_unread = kind == 5
        return self._reset()

    def _on_chunk(self, reply: Reply) -> bytes:
        if not self.unanswered_chunks:
            return self._on_early_reply(reply)
        kind = reply.code // 100
        if kind == 3:
            return self._confused(reply)
        self.unanswered_chunks -= 1
        if kind == 2:
            return b""
        self._refuse(self._accepted, reply, Scope.MESSAGE)
        self.unanswered_chunks += self._complete
        self._complete = False
        if not self.unanswered_chunks:
            return self._reset()
        self.phase = Phase.FURTHER_CHUNKS
        return b""

    def _on_further_chunk(self, reply: Reply) -> bytes:
        self.unanswered_chunks -= 1
        return b"" if self.unanswered_chunks else self._reset()

    def _on_last_chunk(self, reply: Reply) -> bytes:
        if self.unanswered_chunks:
            return self._on_chunk(reply)
        kind = reply.code // 100
        if kind == 3:
            return self._confused(reply)
        self._complete = False
        if kind == 2:
            self.bdat_taken = True
            self.delivered = bool(self._accepted)
            self._settle(self._accepted, reply, Verdict.DELIVERED, Scope.RECIPIENT)
            return self._finish()
        if self._accepted:
            self._refused(Phase.LAST_CHUNK if self.at_once else Phase.FINAL_DOT, reply)
        self._refuse(self._accepted, reply, Scope.MESSAGE)
        return self._finish() if self._mail_refused else self._reset()

    def _on_reset(self, reply: Reply) -> bytes:
        if reply.is_permanent and self._octet_unread:
            self._octet_unread = False
            return self._reset()
        if self.unknown and reply.is_positive:
            self.again = True
        elif self.unknown:
            text = "the server offers CHUNKING and does not know BDAT"
            later = Reply(451, "5.1", text)
            self._settle(self._accepted, later, Verdict.DEFERRED, Scope.MESSAGE, local=True, counts=False)
        return super()._on_reset(reply)

    _on_reply: ClassVar[dict[Phase, Callable[[Any, Reply], bytes]]] = {
        **Transaction._on_reply,
        Phase.FIRST_CHUNK: _on_first_chunk,
        Phase.CHUNKS: _on_chunk,
        Phase.LAST_CHUNK: _on_last_chunk,
        Phase.FURTHER_CHUNKS: _on_further_chunk,
        Phase.RSET: _on_reset,
    }


def _bdat(content: bytes, *, last: bool) -> bytes:
    return (b"BDAT %d LAST\r\n" if last else b"BDAT %d\r\n") % len(content)
