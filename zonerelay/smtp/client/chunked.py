"""The client's half of one mail transaction with BDAT (RFC 3030), for a body of one piece. No I/O.

It differs from `Transaction` in how the content goes. Nothing of it is sent before the last RCPT is answered:
a server that refuses a chunk and does not consume its octets would run the lines of the body as commands.

- First MAIL and the RCPTs, in one write with PIPELINING. If no recipient is accepted, RSET follows.
- On a connection that has not taken a BDAT yet the first octet goes alone, as a chunk of its own (`BDAT 1`).
  So no body is sent to a server that offers CHUNKING without knowing BDAT. One octet that is no line end is
  no command.
- Then the rest is one chunk, the last. A body with several chunks in flight would go on behind a refused one,
  so larger bodies go with DATA.

Policies:

- A message is in doubt when the connection is lost after its last octet was written and before the reply, as
  after the final dot. 421 is a reply, to any command.
- Servers consume the octets of a chunk that they refuse (RFC 3030 2), but some do not. So the connection
  ends at once when the last chunk is refused, and the host gets DATA from then on, which keeps the connection
  after a refusal.
- When the first octet gets 500 to 504, the server does not know BDAT. After RSET the accepted recipients are
  to be asked `again`, with DATA. Such a server may have kept the octet for the beginning of the next command;
  a RSET that it did not understand is sent again.
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
from zonerelay.smtp.client.transaction import BdatTrouble, Peer, Phase, Transaction


def can_be_chunked(head: bytes) -> bool:
    """True when the first octet of the body can go alone: no line end, no blank, no control character."""
    return b"!" <= head[:1] <= b"~"


class ChunkedTransaction(Transaction):
    """`content` is the whole body (`chunk_lines.py`). `probe`: its first octet goes alone."""

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
        self.bdat_taken = False
        """True when a BDAT was answered with 2yz: the server knows it."""
        self._content = content
        self._probe = probe
        self._octet_unread = False
        self._script = self._script.removesuffix(DATA)

    def lost(self, reply: Reply) -> None:
        if self.phase in (Phase.FIRST_CHUNK, Phase.LAST_CHUNK):
            self.trouble = BdatTrouble.UNANSWERED
        super().lost(reply)

    def _session_ends(self, reply: Reply) -> bytes:
        if self.phase is Phase.LAST_CHUNK and not self._probe:
            self._refused(self.phase, reply)
        return super()._session_ends(reply)

    @property
    def _may_be_taken(self) -> bool:
        return self.phase is Phase.LAST_CHUNK

    def _envelope_answered(self) -> bytes:
        if not self._accepted:
            return self._reset()
        if not self._probe:
            return self._last_chunk(self._content)
        self.phase = Phase.FIRST_CHUNK
        return b"BDAT 1\r\n" + self._content[:1]

    def _last_chunk(self, content: bytes) -> bytes:
        self.phase = Phase.LAST_CHUNK
        return b"BDAT %d LAST\r\n%b" % (len(content), content)

    def _on_first_chunk(self, reply: Reply) -> bytes:
        kind = reply.code // 100
        if kind == 3:
            return self._confused(reply)
        if kind == 2:
            self.bdat_taken = True
            return self._last_chunk(self._content[1:])
        if 500 <= reply.code <= 504:
            self.trouble = BdatTrouble.UNKNOWN
        else:
            self._refused(Phase.DATA, reply)
            self._refuse(self._accepted, reply, Scope.MESSAGE)
        self._octet_unread = True
        return self._reset()

    def _on_last_chunk(self, reply: Reply) -> bytes:
        kind = reply.code // 100
        if kind == 3:
            return self._confused(reply)
        if kind == 2:
            self.delivered = self.bdat_taken = True
            self._settle(self._accepted, reply, Verdict.DELIVERED, Scope.RECIPIENT)
        else:
            self.closing = True
            self.trouble = BdatTrouble.REFUSED
            self._refused(Phase.FINAL_DOT if self._probe else Phase.LAST_CHUNK, reply)
            self._refuse(self._accepted, reply, Scope.MESSAGE)
        return self._finish()

    def _on_reset(self, reply: Reply) -> bytes:
        if reply.is_permanent and self._octet_unread:
            self._octet_unread = False
            return self._reset()
        unknown = self.trouble is BdatTrouble.UNKNOWN
        self.again = (unknown or self.parameters_refused) and reply.is_positive
        if unknown and not self.again:
            text = "the server offers CHUNKING and does not know BDAT"
            later = Reply(451, "5.1", text)
            self._settle(self._accepted, later, Verdict.DEFERRED, Scope.MESSAGE, local=True, counts=False)
        return super()._on_reset(reply)

    _on_reply: ClassVar[dict[Phase, Callable[[Any, Reply], bytes]]] = {
        **Transaction._on_reply,
        Phase.FIRST_CHUNK: _on_first_chunk,
        Phase.LAST_CHUNK: _on_last_chunk,
        Phase.RSET: _on_reset,
    }
