"""Accepts messages that are submitted without SMTP, by a call of `MessageSubmitter.submit`.

HTTP, the drop directory and other code call it. An SMTP session performs the same steps, one for each command
(`envelope`, `intake`). It makes all checks of the listener that the `MessageSubmitter` object belongs to:
permission to relay, the user's senders, the user's limits and quotas, access rules, the policy, suspensions,
idempotency, size and rate limits. So the same rules apply to every message, however it is submitted.

Promises:

- `Acceptance` is returned only after the synced commit (rule 1). After a `Rejection`, nothing is stored.
- `pieces` is read only when the envelope has been accepted, never faster than the store accepts it, and not
  after the message was refused. An exception that it raises is raised again, and nothing is stored.
- If the caller is cancelled, a message whose last piece has been read is still stored.
- Unexpected errors are temporary refusals (rule 3).
- The memory of a message is counted in the memory account of all sessions. A message is refused if memory is
  short.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import msgspec
from msgspec import structs

from zonerelay.inbound.access.auth import LoginKind
from zonerelay.inbound.access.networks import Client
from zonerelay.inbound.cleanup.intake import LIST, FirstAnswer, Intake
from zonerelay.inbound.cleanup.submission import SubmittingClient
from zonerelay.inbound.refusal import Refusal
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.client_state import ClientState
from zonerelay.inbound.state.context import AskedPolicy, ListenerContext
from zonerelay.inbound.state.replies import NextAction, ServerReply
from zonerelay.model.envelope import Mailbox, MessageId, Recipient, mailboxes, recipient_key
from zonerelay.smtp.server.params import MailCommand


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """The submitter of a message: its protocol, address and user. `protocol` and `helo` are for the Received
    field. The caller has authenticated `user`; a user who is not in the credentials file is refused. With
    `may_relay`, the caller permits the client to relay; otherwise its address decides.
    """

    protocol: str
    address: str = ""
    port: int = 0
    helo: str = ""
    user: str = ""
    may_relay: bool = False


class SubmittedEnvelope(msgspec.Struct, frozen=True):
    """The envelope of a submission: the sender with the parameters of MAIL, and the recipients with those of
    RCPT.
    """

    mail: MailCommand
    recipients: Sequence[Recipient]


class SubmitOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a submission that an SMTP client sets in header fields, or that SMTP does not have. For
    `zone`, the caller has checked that the principal may name it. `notes` are stored in the trace. With
    `partial`, the message is accepted for the recipients that are not refused.
    """

    idempotency_key: str = ""
    zone: str = ""
    notes: tuple[str, ...] = ()
    partial: bool = False


class SubmitCall(msgspec.Struct, frozen=True):
    """The parameters of a submission, without the content."""

    principal: Principal
    envelope: SubmittedEnvelope
    options: SubmitOptions = SubmitOptions()


class Acceptance(msgspec.Struct, frozen=True, tag=True):
    """The result of a submission whose message was stored. `refused` are the replies to the recipients that
    were refused; this is only possible with `partial`. For a repetition, these are the values of the first
    submission, and `message_id` the Message-ID of the first message.
    """

    id: MessageId
    refused: dict[Mailbox, str] = {}
    message_id: str = ""


class Rejection(Refusal, frozen=True, tag=True):
    """The result of a submission that was refused. With `of_sender`, the sender is refused. `recipients` are
    the refused recipients.
    """

    of_sender: bool = False
    recipients: dict[Mailbox, Refusal] = msgspec.field(default_factory=dict)


Pieces = AsyncIterator[bytes] | Sequence[bytes]
"""The message in pieces of any size, with CRLF line ends. It is a sequence if it is already complete."""

Submit = Callable[[SubmitCall, Pieces], Awaitable[Acceptance | Rejection]]


class MessageSubmitter:
    """Accepts messages that are submitted without SMTP, with the settings of one listener. Submissions that
    have started keep the `context` they began with.
    """

    def __init__(self, context: ListenerContext) -> None:
        self.context = context
        self.draining = False
        self._running: dict[asyncio.Task[Acceptance | Rejection], _Submitting] = {}

    def asks(self, policy: AskedPolicy) -> bool:
        """Return whether a running submission uses this policy."""
        return any(each.context.policy is policy for each in self._running.values())

    async def submit(self, call: SubmitCall, pieces: Pieces) -> Acceptance | Rejection:
        """Submit a message, and return its `Acceptance` or `Rejection`. Raise the exceptions of `pieces`."""
        context = self.context
        if self.draining:
            return _whole(replies.SHUTTING_DOWN)
        if context.memory.tight:
            return _whole(replies.TOO_MUCH_MEMORY)
        client = self._client(call.principal)
        running = _Submitting(context, ClientState(context.settings, context.grants, client, None))
        loop = asyncio.get_running_loop()
        running.task = task = loop.create_task(running.run(call, pieces))
        self._running[task] = running
        task.add_done_callback(self._running.pop)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                return _whole(replies.SHUTTING_DOWN)
            running.abort()
            raise

    def _client(self, principal: Principal) -> Client:
        if not principal.address:
            return Client("", 0, may_relay=principal.may_relay)
        client = self.context.clients.client(principal.address, principal.port)
        return Client(client.address, client.port, client.may_relay or principal.may_relay)

    async def drain(self, timeout: float) -> None:
        """Stop accepting messages. After `timeout` seconds, abort messages that are not completely received;
        return when none is left.
        """
        self.draining = True
        if self._running:
            await asyncio.wait(self._running, timeout=timeout)
        for each in tuple(self._running.values()):
            each.abort()
        if self._running:
            await asyncio.wait(self._running)


class _Submitting(SubmittingClient):
    """A running call of `submit`, with its client and its memory use (a `MemoryHolder`)."""

    task: asyncio.Task[Acceptance | Rejection]

    def __init__(self, context: ListenerContext, client_state: ClientState) -> None:
        super().__init__(context, client_state)
        self._intake: Intake | None = None
        self._storing: asyncio.Task[MessageId | None] | None = None
        self._room: asyncio.Future[None] | None = None

    # `SessionMemory` calls the following methods.

    @property
    def held(self) -> int:
        transaction, intake = self.transaction, self._intake
        return (0 if transaction is None else transaction.cost) + (0 if intake is None else intake.held)

    @property
    def must_stay(self) -> bool:
        return self._intake is None or self._intake.complete

    def shed(self) -> None:
        """Refuse the message, because memory is short."""
        assert self._intake is not None
        self._intake.refuse(replies.TOO_MUCH_MEMORY)
        self._has_room()

    def abort(self) -> None:
        """Abort the submission, unless its message has been received completely."""
        if self._intake is None or not self._intake.complete:
            self.task.cancel()

    # The steps.

    async def run(self, call: SubmitCall, pieces: Pieces) -> Acceptance | Rejection:
        memory = self.context.memory
        memory.holders.add(self)
        try:
            try:
                refused = await self._take_envelope(call)
            except Exception as error:  # noqa: BLE001 - rule 3: unknown trouble is temporary
                self.context.events.error("inbound", error)
                return _whole(replies.LOCAL_ERROR)
            transaction = self.transaction
            if refused is None or (transaction is not None and transaction.unless_repeated is not None):
                return await self._take_content(pieces, refused)
            return refused
        finally:
            memory.holders.discard(self)
            self.reset()

    async def _take_envelope(self, call: SubmitCall) -> Rejection | None:
        """Check the envelope, and return its refusal or None. A refused message with a key may be a
        repetition.
        """
        principal, envelope, options = call.principal, call.envelope, call.options
        self.client_state.protocol, self.client_state.helo = principal.protocol, principal.helo
        answer = await self._log_in(principal.user) if principal.user else None
        answer = answer or await self._decided(self.connect())
        if answer.reason is None:
            answer = await self._decided(self.hello(principal.helo, extended=True))
        if answer.reason is None and self.client_state.grants.must_log_in:
            answer = self.refuse(replies.AUTH_FIRST, "MAIL")
        if answer.reason is not None:
            return _whole(answer)
        answer = await self._decided(self.begin(envelope.mail, options.idempotency_key))
        if answer.reason is not None:
            return _whole(answer, of_sender=True)
        transaction = self.transaction
        assert transaction is not None
        transaction.zone_named, transaction.notes = options.zone, options.notes
        refused: dict[Mailbox, ServerReply] = {}
        for at, each in enumerate(envelope.recipients, 1):
            await _let_others_run(at)
            answer = self.add(transaction, recipient_key(each.address), each)
            if answer.then is not NextAction.GO_ON:
                answer = await self._decided(answer)
            if answer.reason is not None:
                refused[each.address] = answer
                if options.idempotency_key and not options.partial:
                    transaction.recipients[recipient_key(each.address)] = each
        if options.partial:
            transaction.asked = mailboxes(envelope.recipients)
            transaction.refused = {address: str(each.refusal.reply) for address, each in refused.items()}
        if (whole := transaction.unless_repeated) is not None:
            return _whole(whole, of_sender=True)
        if refused and (not options.partial or len(refused) == len(envelope.recipients)):
            # Prefer a permanent refusal, if there is one.
            worst = max(refused.values(), key=lambda each: each.reply.code)
            transaction.unless_repeated = worst if options.idempotency_key else None
            recipients = {address: each.refusal for address, each in refused.items()}
            return structs.replace(_whole(worst), recipients=recipients)
        if not transaction.recipients:
            return _whole(self.refuse(replies.NO_RECIPIENTS, "DATA"))
        return None

    async def _log_in(self, user: str) -> ServerReply | None:
        """Log the client in as this user. Return a refusal if the user does not exist."""
        users = self.context.named
        login = None if users is None else await users.named(user)
        if login is None or login.kind is LoginKind.BROKEN:
            detail = "" if login is None else login.detail
            return self.refuse(replies.AUTH_FAILURE, "AUTH", detail=detail)
        if login.user is None:
            return self.refuse(replies.AUTH_FAILED, "AUTH", detail=login.detail)
        self.client_state.logged_in(login.user)
        return None

    async def _decided(self, answer: ServerReply) -> ServerReply:
        """Perform the lookups that a reply depends on, and return the reply."""
        while answer.then is NextAction.ASK:
            assert self.question is not None
            answer = self.decided(await self.context.ask(self.question))
        return answer

    async def _take_content(self, pieces: Pieces, refused: Rejection | None) -> Acceptance | Rejection:
        """Receive the content and store the message. A `refused` message is only compared with one that was
        submitted before.
        """
        transaction = self.transaction
        assert transaction is not None
        transaction.chunked = True  # the pieces are chunks: they have neither dot-stuffing nor a final dot
        self._intake = intake = self.new_intake(self._has_room)
        try:
            if isinstance(pieces, AsyncIterator):
                await self._stream(intake, pieces)
            else:
                whole = b"".join(pieces)
                intake.begin_chunk(len(whole), last=True)
                intake.feed(whole)
            storing = self._storing or (intake.store() if intake.refusal is None else None)
            accepted = None if storing is None else await storing
            if accepted is not None and intake.first_answer:
                first = msgspec.json.decode(intake.first_answer, type=FirstAnswer)
                return Acceptance(accepted, first.refused, first.message_id)
            if accepted is not None:
                return Acceptance(accepted, transaction.refused)
            assert intake.refusal is not None
            if refused is not None and intake.refusal is transaction.unless_repeated:
                return refused
            self.refuse_content(intake, intake.refusal, "DATA")
            return _whole(intake.refusal)
        except BaseException:
            if not intake.complete:
                self.refuse_content(intake, replies.CLIENT_LEFT, "DATA")
            raise
        finally:
            if self._storing is not None and not intake.complete:
                self._storing.cancel()
            intake.release()

    async def _stream(self, intake: Intake, pieces: AsyncIterator[bytes]) -> None:
        loop, memory = asyncio.get_running_loop(), self.context.memory
        async for piece in pieces:
            intake.begin_chunk(len(piece), last=False)
            intake.feed(piece)
            if self._storing is None and intake.refusal is None and intake.worth_storing:
                self._storing = loop.create_task(intake.store())
                self._storing.add_done_callback(lambda _: self._has_room())
            if memory.full:
                memory.relieve()
            while intake.refusal is None and intake.held_up:
                self._room = loop.create_future()
                await self._room
            if intake.refusal is not None:
                return
        intake.begin_chunk(0, last=True)
        intake.feed(b"")

    def _has_room(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)


def _whole(answer: ServerReply, *, of_sender: bool = False) -> Rejection:
    refusal = answer.refusal
    return Rejection(refusal.reason, refusal.reply, refusal.retry_after, of_sender=of_sender)


async def _let_others_run(at: int) -> None:
    """Let other tasks run after every `LIST` recipients, because refused recipients are not limited."""
    if at % LIST == 0:
        await asyncio.sleep(0)
