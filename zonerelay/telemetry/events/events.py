"""The relay's mail events: each function logs one event and increments its counters.

No other module logs lines about mail. Events about one message or one client are also written to the history,
with its own form of addresses. Events have fields, not sentences. Addresses pass the redactor, and remote
text passes `redact.text`. Only zone names, outcomes and reasons from our own fixed lists become metric
labels. Never raises.

Domains are shown as destinations are, and text from remote hosts is redacted. A failed fetch of an MTA-STS
policy is a warning even while an older policy is active, because an operator has to act before that expires
(RFC 8461, section 10.2). A refused login at a smarthost is an error, because the mail of a whole zone waits
until an operator corrects it.
"""

import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from itertools import groupby, islice
from operator import itemgetter
from typing import Any, Protocol, TypeVar, cast

from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery, DeliveryKey, queue_of
from zonerelay.model.envelope import Envelope, Mailbox, Message, MessageId, Origin
from zonerelay.model.reply import Outcome, Reply
from zonerelay.telemetry.events.records import MailEvent
from zonerelay.telemetry.events.transcript import BoundedStream, Transcripts
from zonerelay.telemetry.logs.logs import OTHERS, LineLimits
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.telemetry.metrics.instruments import Figures
from zonerelay.telemetry.metrics.metrics import RESULTS, Metrics

Field = str | int | float | bool | None
Emit = Callable[[str, str, dict[str, Field]], None]
"""`LogSink.emit`."""

Result = tuple[Delivery, Outcome, float | None]
"""The outcome of an attempt, and after a deferral the time of the next."""

MAX_HOSTS = 5  # named in one line
MAX_ALIKE = 100
"""Recipients in one event of the history."""


class LogSink(Protocol):
    """Interface: receives events with their level, name and fields."""

    def emit(self, level: str, event: str, fields: dict[str, Field], /) -> None: ...


_SHOWN: Mapping[str, Callable[[Redactor, Any], Field]] = {
    **dict.fromkeys(
        ("sender", "recipient", "mailbox"), lambda redact, text: redact.mailbox(Mailbox(str(text)))
    ),
    **dict.fromkeys(
        ("reply", "reason", "detail", "about", "problem", "why", "line", "of"),
        lambda redact, text: redact.text(str(text)),
    ),
    "client": lambda redact, text: text if text == OTHERS else redact.client(text),
    "user": Redactor.user,
    "hosts": lambda _, names: " ".join(names[:MAX_HOSTS]),
    "until": lambda _, at: round(at, 3),
    **dict.fromkeys(("expires", "kept_until"), lambda _, at: round(at)),
    "seconds": lambda _, seconds: round(seconds, 1),
}
"""How the values of some fields are shown, because they may have personal data or are too exact."""
RENAMED = {"message_id": "id", "who": "by", "authority": "from", "subject": "of", "policy_id": "policy"}
"""The names of parameters that differ from those of the fields."""


def shown(fields: Mapping[str, Any], redact: Redactor) -> dict[str, Field]:
    """Return the fields that have a value, with personal data redacted."""
    return {
        name: _SHOWN[name](redact, value) if name in _SHOWN else value
        for name, value in fields.items()
        if value is not None
    }


F = TypeVar("F", bound=Callable[..., None])


def logged(level: str, event: str = "", **more: Any) -> Callable[[F], F]:
    """Return a decorator that makes a method report the event of its name or `event`. Its parameters are the
    fields of the event, and its body counts it. Without `event`, the first argument is the name. `more` is
    passed to `Events.report`.
    """

    def decorated(count: F) -> F:
        parameters = list(inspect.signature(count).parameters.values())[1 if event else 2 :]
        # A field without a value is not shown.
        defaults = {
            each.name: each.default if each.default is not each.empty else None for each in parameters
        }

        @wraps(count)
        def report(self: Any, *given: Any, **named: Any) -> None:
            count(self, *given, **named)
            name, *values = (event, *given) if event else given
            fields = {**defaults, **dict(zip(defaults, values, strict=False)), **named}
            self.report(level, name, {RENAMED.get(each, each): fields[each] for each in fields}, **more)

        return cast(F, report)

    return decorated


class HistorySink(Protocol):
    """Interface: writes mail events to the history. `redactor` converts the addresses in it."""

    redactor: Redactor

    def put(self, event: str, fields: dict[str, Field]) -> None: ...


class Events:
    """Reports the events of one worker: logs and counts them, and writes them to the history. The level info
    is for the life of a message; a warning requires an operator's attention.
    """

    def __init__(
        self,
        sink: LogSink,
        metrics: Metrics,
        redactor: Redactor,
        clock: Clock,
        history: HistorySink | None = None,
    ) -> None:
        self._log = sink.emit
        self.emit: Emit = sink.emit
        """Logs an event. It changes with the followers, so other classes keep this object instead."""
        self._followers: list[BoundedStream[MailEvent]] = []
        self.transcripts = Transcripts(clock)
        self.metrics = metrics
        self._redact = redactor
        self._clock = clock
        self._history = history
        self._refusals = LineLimits(self._refused_more, clock.now)
        self.tell_webhooks: Callable[[str, dict[str, Field]], None] = lambda event, fields: None
        """Is told of the relay's own events."""

    def report(
        self, level: str, event: str, fields: Mapping[str, Any], *, stored: bool = False, webhook: str = ""
    ) -> None:
        """Write an event to the log. With `stored`, also write it to the history, which may redact personal
        data differently. `webhook` is the name of the event for webhooks.
        """
        known = shown(fields, self._redact)
        self.emit(level, event, known)
        if stored and self._history is not None:
            own = self._history.redactor
            self._history.put(event, known if own is self._redact else shown(fields, own))
        if webhook:
            self.tell_webhooks(webhook, known)

    def follow(self, stream: BoundedStream[MailEvent]) -> None:
        """Send every mail event to this stream, too. This costs nothing while there is no stream."""
        self._followers = [*self._followers, stream]
        self.emit = self._emit_and_tell

    def leave(self, stream: BoundedStream[MailEvent]) -> None:
        self._followers = [each for each in self._followers if each is not stream]
        if not self._followers:
            self.emit = self._log

    def _emit_and_tell(self, level: str, event: str, fields: dict[str, Field]) -> None:
        self._log(level, event, fields)
        record = MailEvent(at=self._clock.now(), event=event, level=level, fields=fields)
        for stream in self._followers:
            stream.put(record)

    def accepted(self, message: Message, *, bare_lf: int = 0, bare_cr: int = 0) -> None:
        """Log an accepted message: it is durable, and a 250 is about to be sent."""
        envelope = message.envelope
        self.metrics.accepted(message.size, len(envelope.recipients))
        bare = {"bare_lf": bare_lf, "bare_cr": bare_cr} if bare_lf or bare_cr else {}
        self.metrics.bare_line_ends.value += bare_lf + bare_cr
        shown = accepted_fields(message, self._redact, bare)
        self.emit("info", "accepted", shown)
        if self._history is not None:
            own = self._history.redactor
            fields = dict(shown) if own is self._redact else accepted_fields(message, own, bare)
            origin = envelope.origin
            fields |= {"listener": origin.listener, "tls": origin.tls, "helo": own.text(origin.helo)}
            if len(message.trace) > 1:  # the first note names the listener
                fields["route"] = own.text(", ".join(message.trace[1:]))
            if tags := message.tags:
                fields["tags"] = " ".join(tags)
            if metadata := message.metadata:
                shown_as = {name: own.text(value) for name, value in metadata.items()}
                fields["metadata"] = json.dumps(shown_as, ensure_ascii=False)
            self._history.put("accepted", fields)

    def refused(
        self,
        origin: Origin,
        command: str,
        reply: Reply,
        reason: str,
        *,
        message_id: MessageId | None = None,
        sender: Mailbox | None = None,
        mailbox: Mailbox | None = None,
        detail: str = "",
    ) -> None:
        """Log a refused command or connection. `reason` is one of a fixed list (a metric label); `detail` is
        for the operator and not sent to the client.
        """
        self.metrics.refused.add((reason,))
        client = origin.client_address
        if not self._refusals.shows(client, reason, known=not origin.stranger):
            return

        fields: dict[str, Field] = {
            "command": command,
            "reason": reason,
            "reply": str(reply),
            "client": client,
            "id": message_id,
            "sender": sender,
            "mailbox": mailbox,
            "user": origin.user or None,
            "detail": detail or None,
        }
        self.report("info" if reply.code != 451 else "warning", "refused", fields, stored=True)

    def _refused_more(self, client: str, more: Counter[str]) -> None:
        reasons = ", ".join(f"{reason} {count}" for reason, count in more.most_common())
        self.report(
            "info", "refused-more", {"client": client, "count": more.total(), "reasons": reasons}, stored=True
        )

    def login(self, result: str, client: str, *, user: str = "") -> None:
        """Log the result of a login (AUTH): `ok`, `wrong`, `locked` or `broken`. `user` is the name of an
        existing user or "".
        """
        self.metrics.logins.add((result,))
        if result != "ok" and not self._refusals.shows(client, f"login-{result}"):
            return

        fields = {"client": client, "user": user or None, "reason": None if result == "ok" else result}
        if result == "ok":
            self.report("info", "logged-in", fields)
        elif result != "broken":  # a broken credentials file has an event of its own, once and not per client
            self.report("warning", "login-failed", fields, stored=True)

    @logged("info", "credentials-read")
    def credentials_read(self, users: int) -> None:
        """Log that the credentials file was read."""

    @logged("error", "credentials-broken")
    def credentials_broken(self, problem: str) -> None:
        """Report that the credentials file cannot be read (`problem` names the line), so no user can log
        in.
        """

    @logged("warning", "quota-near")
    def quota_near(self, user: str, quota: str, used: int, most: int) -> None:
        """Report that a user has nearly used up a quota."""

    def shown_user(self, user: str) -> str:
        """Return a user's name as a metric label, with a pseudonym in place of an address."""
        return self._redact.always().user(user)

    def reply_lost(self, message_id: MessageId, origin: Origin) -> None:
        """Log that the client disconnected before the reply 250; the message is durable, and may be submitted
        again.
        """
        self.report("warning", "reply-lost", {"id": message_id, "client": origin.client_address}, stored=True)

    def repeated(self, message_id: MessageId, envelope: Envelope) -> None:
        """Log that a message with an idempotency key was submitted again; the client gets the first reply."""
        self.report(
            "info", "repeated", {"id": message_id, "client": envelope.origin.client_address}, stored=True
        )

    def attempted(
        self, attempts: Iterable[Result], *, destination: str, seconds: float | None = None
    ) -> None:
        """Log the results of one attempt: `delivered`, `deferred`, `bounced` or `expired`.

        The log has a line for each recipient; the history has one event for all recipients with the same
        result. A deferral includes the Unix time of the next attempt. All results include the duration of the
        attempt in seconds.
        """
        now = self._clock.now()
        for _, results in groupby(attempts, _common):
            alike = list(results)
            delivery, outcome, _ = alike[0]
            verdict, created = str(outcome.verdict), delivery.created
            # An operator may send mail before the release time that its sender requested.
            age = now - created if now > created else 0.0
            count = len(alike)
            self.metrics.settled(delivery.queue.label, verdict, age, count, in_doubt=outcome.in_doubt)
            if verdict == "delivered":
                self.metrics.last_delivered.value = int(now)
            if outcome.host:
                code = 0 if outcome.local else outcome.reply.code
                self.metrics.replied(outcome.host, code, count)
            fields = attempt_fields(*alike[0], destination, age, seconds)
            recipients = [delivery.recipient for delivery, _, _ in alike]
            shown = _shown(outcome, recipients, self._redact)
            for recipient, reply in shown:
                self.emit("info", verdict, {**fields, "recipient": recipient, "reply": reply})
            if self._history is not None:
                own = self._history.redactor
                stored = shown if own is self._redact else _shown(outcome, recipients, own)
                self._keep(self._history, verdict, fields, stored)

    def _keep(
        self, history: HistorySink, verdict: str, fields: dict[str, Field], shown: Sequence[tuple[str, str]]
    ) -> None:
        """Write the results of recipients to the history, with one event for those that differ only in the
        recipient. `shown` has recipients with the replies about them.
        """
        for reply, about in groupby(shown, itemgetter(1)):
            while recipients := [recipient for recipient, _ in islice(about, MAX_ALIKE)]:
                found = {**fields, "recipient": recipients[0], "reply": reply}
                if len(recipients) > 1:
                    found["to"] = " ".join(recipients)
                    del found["recipient"]
                history.put(verdict, found)

    def dropped(self, keys: Sequence[DeliveryKey]) -> None:
        """Write the deliveries that an operator has dropped to the history. `operated` logs one line for all;
        the history has an event for each.
        """
        if self._history is not None:
            mailbox = self._history.redactor.mailbox
            for key in keys:
                self._history.put("dropped", {"id": key.message_id, "recipient": mailbox(key.recipient)})

    @logged("info", "dsn", stored=True)
    def dsn(self, kind: str, message_id: MessageId, about: MessageId, recipients: int) -> None:
        """Log that a DSN is sent; `kind` is `failed`, `delayed` or `delivered`."""
        self.metrics.dsn.add((kind,))

    @logged("info", "no-dsn", stored=True)
    def no_dsn(self, about: MessageId, reason: str) -> None:
        """Log that no DSN is sent; `reason` is one of NO_DSN_REASONS."""
        self.metrics.no_dsn.add((reason,))

    @logged("warning", "suspended", webhook="destination.suspended")
    def suspended(self, zone: str, destination: str, until: float, reply: Reply) -> None:
        self.metrics.destinations_suspended.add((queue_of(zone).label,))

    @logged("info", "resumed", webhook="destination.resumed")
    def resumed(self, zone: str, destination: str) -> None:
        """Log that a suspended destination gets mail again."""

    @logged("warning", "source-refused")
    def source_refused(self, zone: str, source: str, destination: str, reply: Reply, until: float) -> None:
        """Report that a destination refuses one of the relay's source addresses. Another one is used until
        the Unix time `until`, if possible.
        """
        self.metrics.source_refusals.add((source,))

    def source_refused_again(self, source: str) -> None:
        """Count another refusal by a destination that already refuses the source."""
        self.metrics.source_refusals.add((source,))

    @logged("error", "source-absent")
    def source_absent(self, source: str, address: str, problem: str) -> None:
        """Report that this machine does not have one of the relay's source addresses now."""

    @logged("info", "source-back")
    def source_back(self, source: str, address: str) -> None:
        """Log that this machine has a missing source address again."""

    @logged("warning", "operated", stored=True)
    def operated(
        self,
        verb: str,
        count: int,
        *,
        detail: str = "",
        act: str | None = None,
        who: str | None = None,
        reason: str | None = None,
    ) -> None:
        """Log an operator's change to the queue with its id, as far as this worker has applied it."""

    def requested(self, fields: Mapping[str, str]) -> None:
        """Log an operator's change over HTTP, or a request with an invalid token."""
        given = {"by": fields.get("by"), "client": fields.get("client"), "request": fields["request"]}
        self.emit("warning", "http-request", shown(given, self._redact))

    @logged("warning", stored=True)
    def order(
        self, event: str, order: str, *, effect: str, about: str, who: str, reason: str, until: float | None
    ) -> None:
        """Log that an operator's suspension or hold rule has begun, changed or ended: `order-given`,
        `order-changed`, `order-ended` or `order-expired`.
        """

    @logged("info", "held", stored=True)
    def held(self, message_id: MessageId, recipient: Mailbox, order: str) -> None:
        """Log that a hold rule has held a delivery that would have been attempted."""

    @logged("warning", "body-read")
    def body_read(self, message_id: MessageId, zone: str, who: str) -> None:
        """Log that an operator has read a message, as `zone` sends it or as received ("")."""

    @logged("warning", "transcript-begun")
    def transcript_begun(self, subject: str, seconds: float, who: str) -> None:
        """Log that an operator reads a transcript. `subject` is a client, a destination or a message."""

    def outbound_tls(self, zone: str, level: str, result: str, *, host: str = "", why: str = "") -> None:
        """Count a connection that attempted TLS by its result: `ok`, `failed` (not used) or `fallback` (clear
        text). If `why` is given, log it.
        """
        self.metrics.tls_connections.add((queue_of(zone).label, level, result))
        if why:
            self.report("info", "tls-fallback", {"zone": zone, "host": host, "why": why})

    @logged("info", "reply-without-code")
    def reply_without_code(self, host: str, peer: str, line: str) -> None:
        """Report a host whose replies contain lines without a code, at most once a day per address."""

    @logged("error", "zone-missing")
    def zone_missing(self, zone: str, deliveries: int) -> None:
        """Report a zone that has mail but is not configured."""

    @logged("error", "drop-refused")
    def drop_refused(self, file: str, owner: int, why: str) -> None:
        """Report that a message of sendmail(1) in the drop directory was refused; its file stays."""

    @logged("warning", "drop-delayed")
    def drop_delayed(self, file: str, owner: int, why: str) -> None:
        """Report that a message of sendmail(1) in the drop directory cannot be accepted now; it is
        retried.
        """

    def store_health(self, reason: str | None) -> None:
        """Report why the store accepts no mail, or with `None` that it accepts mail again."""
        if reason is None:
            self.emit("info", "store-recovered", {})
            self.tell_webhooks("spool.recovered", {})
        else:
            self.emit("error", "store-unhealthy", {"reason": reason})
            self.tell_webhooks("spool.unhealthy", {"reason": reason})

    @logged("error", "store-damaged")
    def store_damaged(self, detail: str) -> None:
        """Report a record that the store cannot read, for the first time since the start."""
        self.metrics.damage.value += 1

    @logged("info", "certificate-loaded")
    def certificate_loaded(
        self, listener: str, file: str, *, name: str, names: int, expires: float, fingerprint: str
    ) -> None:
        """Log the certificate that a listener uses for new sessions from now on."""

    @logged("warning", "certificate-refused")
    def certificate_refused(self, listener: str, file: str, problem: str) -> None:
        """Report that a changed certificate file cannot be used; the previous certificate stays active."""

    @logged("warning", "certificate-expiring")
    def certificate_expiring(
        self, listener: str, file: str, *, name: str, expires: float, days: float
    ) -> None:
        """Report a certificate that expires soon, in `days` days."""

    @logged("error", "history-broken")
    def history_broken(self, problem: str) -> None:
        """Report that the history cannot be written, or that its unusable file was renamed. Other threads may
        call this.
        """

    @logged("info", "history-restored")
    def history_restored(self, dropped: int) -> None:
        """Report that the history can be written again, and how many events were lost. Other threads may call
        this.
        """

    def close(self) -> None:
        """Log the refusals that were only counted in the current interval."""
        self._refusals.tell()

    def lifecycle(self, event: str, **fields: Field) -> None:
        """Log an event of the relay itself, such as its start."""
        self.emit("info", event, fields)

    @logged("warning", "spool-kept")
    def spool_kept(self, spool: str, why: str) -> None:
        """Report that the spool of a removed worker is not empty although it has no deliveries."""

    @logged("error", "policy-failed")
    def policy_failed(self, step: str, kind: str, detail: str) -> None:
        """Report that a policy call failed at a step: `timeout`, `error`, `busy` or `bad-decision`."""
        self.metrics.policy_failures.add((step, kind))

    @logged("error", "dkim-missing")
    def dkim_missing(self, zone: str, reason: str) -> None:
        """Report that mail of a domain must be signed but there is no key, once per domain."""

    @logged("warning", "sent-unchanged")
    def sent_unchanged(self, message_id: MessageId, zone: str, reason: str) -> None:
        """Log that a message is sent without the zone's changes; `reason` is one of a fixed list."""

    @logged("warning", "row-refused")
    def row_refused(self, row: int, problem: str) -> None:
        """Log that a row of the outbox failed without an attempt, because it can never be sent."""

    def read_limits(self, figures: Callable[[], Mapping[str, tuple[int, int, int]]]) -> None:
        """Set the function that returns the numbers of slots held, used and wanted by zone, for the
        metrics.
        """

        def places() -> Mapping[str, Figures]:
            numbers = Counter[tuple[str, ...]]()
            for zone, given in figures().items():
                for state, number in zip(("held", "used", "wanted"), given, strict=True):
                    numbers[queue_of(zone).label, state] += number
            return {"zonerelay_limits_places": numbers}

        self.metrics.limits.attach(places)

    def limit_waited(self, seconds: float) -> None:
        self.metrics.limit_waits.observe(seconds)

    @logged("warning", "limits-lost")
    def limits_lost(self, authority: str, reason: str) -> None:
        self.metrics.limits_lost.value += 1
        self.metrics.limits_reachable.value = 0

    @logged("info", "limits-restored")
    def limits_restored(self, authority: str) -> None:
        self.metrics.limits_reachable.value = 1

    def sts_looked_up(self, result: str) -> None:
        """Count an MTA-STS lookup by the mode of the active policy (`enforce`, `testing`, `none`), or as
        `absent` or `failed`.
        """
        self.metrics.sts_look_ups.add((result,))

    @logged("info", "mta-sts-policy")
    def sts_fetched(self, domain: str, *, mode: str, policy_id: str, expires: float) -> None:
        self.metrics.sts_fetches.add(("fetched",))

    @logged("warning", "mta-sts-failed")
    def sts_failed(self, domain: str, problem: str, *, kept_until: float | None) -> None:
        """Report that an MTA-STS policy cannot be fetched; the cached one is used until `kept_until`."""
        self.metrics.sts_fetches.add(("failed",))

    @logged("warning", "mta-sts-mismatch")
    def sts_mismatch(self, domain: str, hosts: Sequence[str], *, mode: str) -> None:
        """Report MX hosts that an MTA-STS policy does not list; they are not used in mode enforce."""
        self.metrics.sts_mismatches.add((mode,))

    @logged("warning", "mta-sts-files")
    def sts_files(self, problem: str) -> None:
        """Report that a stored MTA-STS policy cannot be read, or that one cannot be stored."""

    def dns_asked(self, result: str) -> None:
        """Count a DNS query; `result` is one of `DNS_RESULTS`."""
        self.metrics.dns_look_ups.add((result,))

    @logged("error", "name-servers-lost")
    def name_servers_lost(self, servers: str, reason: str) -> None:
        """Report that no name server is usable, so mail waits for DNS lookups."""
        self.metrics.name_servers_lost.value += 1
        self.metrics.name_servers_reachable.value = 0

    @logged("info", "name-servers-restored")
    def name_servers_restored(self, servers: str, seconds: float) -> None:
        self.metrics.name_servers_reachable.value = 1

    def declare_logins(self, zones: Iterable[str]) -> None:
        """Initialize the counters of logins at smarthosts with 0, for the zones that log in."""
        labels = ((queue_of(zone).label, result) for zone in zones for result in RESULTS)
        self.metrics.smarthost_logins.declare(labels)

    def login_answered(self, zone: str, result: str) -> None:
        """Count a login at a smarthost: `ok`, `refused`, `failed` (temporarily), or `broken` (it could not be
        tried).
        """
        self.metrics.smarthost_logins.add((queue_of(zone).label, result))

    @logged("error", "login-refused")
    def login_refused(self, zone: str, credential: str, host: str, reply: str) -> None:
        """Report that a smarthost refused a login. It is not retried for a while; all mail that needs the
        credential waits.
        """

    @logged("error", "login-broken")
    def login_broken(self, zone: str, credential: str, problem: str) -> None:
        """Report that a credential's secret is unreadable, or that no access token can be obtained."""

    @logged("info", "login-restored")
    def login_restored(self, zone: str, credential: str, host: str) -> None:
        """Report that a credential which was refused or broken works again."""

    @logged("warning", "token-trouble")
    def token_problem(self, credential: str, problem: str) -> None:
        """Report that an access token could not be renewed while it is still valid, or that a refresh token
        was not stored.
        """

    @logged("warning", "webhook-failing")
    def webhook_failing(self, webhook: str, problem: str) -> None:
        """Report that a webhook's endpoint does not accept events, once until it does again. Its events
        wait.
        """

    @logged("info", "webhook-restored")
    def webhook_restored(self, webhook: str) -> None:
        """Report that a webhook's endpoint accepts events again."""

    @logged("error", "webhook-disabled")
    def webhook_disabled(self, webhook: str) -> None:
        """Report that a webhook's endpoint responded with 410, so it gets no more events."""

    @logged("error", "webhook-gap")
    def webhook_lost(self, webhook: str, lost: int, why: str) -> None:
        """Report that events of a webhook were lost. A webhook.gap event reports them to the endpoint, unless
        the webhook was removed.
        """
        self.metrics.webhook_events.add((webhook, "lost"), lost)

    def error(self, where: str, error: BaseException, *, message_id: MessageId | None = None) -> None:
        """Report an unexpected error in the relay. No mail is lost by it; the text is for the operator."""
        self.metrics.errors.add((where,))
        text = self._redact.text(f"{type(error).__name__}: {error}")
        fields: dict[str, Field] = {"where": where, "error": text, "at": _raised_at(error)}
        if message_id:
            fields["id"] = message_id
        self.emit("error", "trouble", fields)


def _common(result: Result) -> tuple[object, ...]:
    """Return the parts of a result that recipients with the same event share."""
    delivery, outcome, next_attempt = result
    return (outcome, delivery.message_id, delivery.queue, delivery.created, delivery.attempts, next_attempt)


def _shown(outcome: Outcome, recipients: Sequence[Mailbox], redact: Redactor) -> list[tuple[str, str]]:
    """Return each recipient and the reply, with both redacted, because the reply may contain the
    recipient.
    """
    replies = redact.about_each(str(outcome.reply), recipients)
    return list(zip(map(redact.mailbox, recipients), replies, strict=True))


def attempt_fields(  # noqa: PLR0917 - in the order of a `Result`
    delivery: Delivery,
    outcome: Outcome,
    next_attempt: float | None,
    destination: str,
    age: float,
    seconds: float | None,
) -> dict[str, Field]:
    """Return the fields that the log, the history and webhooks report about an attempt, except `recipient`
    and `reply`.
    """
    found: dict[str, Field] = {
        "id": delivery.message_id,
        "recipient": "",
        "zone": delivery.zone,
        "destination": destination,
        "host": outcome.host,
        "peer": outcome.peer,
        "tls": outcome.tls,
        "attempt": delivery.attempts + (1 if outcome.counts else 0),
        "reply": "",
        "age": round(age, 3),
    }
    if outcome.source:
        found["source"] = outcome.source
    if seconds is not None:
        found["seconds"] = round(seconds, 3)
    if next_attempt is not None:
        found["next_attempt"] = round(next_attempt, 3)
    if outcome.in_doubt:
        found["in_doubt"] = True
    return found


def accepted_fields(message: Message, redact: Redactor, bare: dict[str, int]) -> dict[str, Field]:
    """Return the fields that the log, the history and webhooks report about an accepted message."""
    envelope = message.envelope
    origin = envelope.origin
    fields: dict[str, Field] = {
        "id": message.id,
        "sender": redact.mailbox(envelope.sender),
        "recipients": len(envelope.recipients),
        "to": " ".join([redact.mailbox(each.address) for each in envelope.recipients]),
        "message-id": redact.message_id(message.header("message-id")),
        "size": message.size,
        "client": redact.client(origin.client_address),
        "protocol": origin.protocol,
    }
    if origin.user:
        fields["user"] = redact.user(origin.user)
    return {**fields, **bare} if bare else fields


def _raised_at(error: BaseException) -> str:
    """Return the file, line and function in which an exception was raised, for bug reports."""
    trace = error.__traceback__
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return f"{code.co_filename.rpartition('/')[2]}:{trace.tb_lineno} {code.co_name}"
