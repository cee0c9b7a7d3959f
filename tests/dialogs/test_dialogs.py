r"""Transcripts as tests: every file in `transcripts/` is one conversation with a listener.

The stage, wherever it stands in the file:

    # what it shows                        any number of comment lines
    set max_recipients = 2                 a setting of [[listener]], as in the configuration; numbers may be
                                           small. TLS gets a certificate by itself; allow_certificates is
                                           that of the client that shakes hands as `client`, whatever it says
    auth max_client_failures = 2           a setting of [auth]
    user app1 secret a@example.org         a user of the credentials file, with senders or without
    access {user = ["app1"]}               an access rule
    rewrite {address = ["a@b"], to = "@c"} other addresses
    srs srs.example                        the domain of senders that SRS has made, with a secret that stays;
                                           `srs srs.example legacy`: with accept_legacy
    policy rcpt = refuse(550, "7.1", "x")  what a policy says at this step: a Python expression with `event`,
                                           `accept`, `refuse`, `sleep` and `wait`; 1/0 is a bug. Zones: bulk
    dns null.example = {MX = ["0 ."]}      for check_sender_domain; `{}` is SERVFAIL, all others NXDOMAIN
    memory 100000                          octets for all sessions together

The conversation, in order:

    store full                             full | broken | bug | lost | sick | slow | hold: what it does next
    answer                                 what waits goes on: a store on hold or lost, a policy's `wait()`
    silence                                nothing comes
    C: EHLO client                         the client sends a line; consecutive ones go out in one packet
    R: a\nb\r\n                            the client sends exactly these octets
    flush                                  the packet ends here
    S: 250 2.0.0 *                         the server's next line; `*` stands for any text
    E: STARTTLS !AUTH                      the server's answer to EHLO; it offers this, and not that
    T:                                     the client's TLS handshake; `T: client` with a certificate
    X:                                     the server closes; with words: after saying these octets;
                                           `*` at their end stands for any
    leave                                  the client is gone, without a word
    reset                                  the same, with a TCP reset
    half-close                             the client says no more, and still listens
    drain 5                                the listener stops, with so many seconds for those who are there:
                                           it still does so at `draining`, and has at `drained`
    connect                                another client, which speaks from here on; the one before stays

In C, R and S `{base64 \0app1\0secret}` stands for that in base64, and `{500 xy}` for 500 times `xy`.

What came of it:

    M: Subject: x\r\n\r\nbody\r\n          the last stored message ends with exactly this
    H: X-Policy: *                         a field of it, unfolded; `H: !X-Old: *`: there is none like it
    N: 1                                   how many messages are stored by now
    A: 1                                   how many were begun in the store and forgotten
    F: a@example.org > b@example.com       envelope of the last stored message
    D: notify = SUCCESS|DELAY -            a fact of it (FACTS); those of recipients in their order
    L: size                                the reason of the latest refusal in the log

Every line of the server is checked for form (RFC 5321 4.2, RFC 2034) in passing, and that what sessions
hold is in the account of memory as long as they hold it.
"""

import ast
import asyncio
import base64
import fnmatch
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from tests.dialogs.staging import Step, client_context, load, staged
from tests.support.inbound import House, RememberingStore, Stored, Talk
from tests.support.waiting import until
from zonerelay.model.envelope import path
from zonerelay.store.contract import StoreError, StoreFullError, Unhealthy

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))
STAGE = frozenset({"set", "auth", "user", "access", "rewrite", "srs", "policy", "dns", "memory"})
STORE_ERRORS = {
    "full": StoreFullError("No space left on device"),
    "broken": StoreError("/var/lib/zonerelay/spool: Input/output error"),
    "bug": ZeroDivisionError("/secret/path"),
    "lost": OSError(28, "No space left on device", "/secret/path"),
}
FACTS: dict[str, Callable[[Stored], str]] = {
    "client": lambda stored: stored.message.envelope.origin.client_address,
    "helo": lambda stored: stored.message.envelope.origin.helo,
    "user": lambda stored: stored.message.envelope.origin.user,
    "stranger": lambda stored: str(stored.message.envelope.origin.stranger),
    "protocol": lambda stored: re.findall(rb"with (\S+)", stored.body)[0].decode(),
    "body": lambda stored: stored.message.envelope.body,
    "smtputf8": lambda stored: str(stored.message.envelope.smtputf8),
    "ret": lambda stored: stored.message.envelope.ret,
    "envid": lambda stored: stored.message.envelope.envid,
    "priority": lambda stored: stored.message.envelope.priority,
    "trace": lambda stored: "; ".join(stored.message.trace[1:]),
    "fields": lambda stored: "; ".join(
        ": ".join(field)
        for field in stored.message.headers
        if field[1] not in (f"<{stored.message.id}@relay.example.org>", path(stored.message.envelope.sender))
    ),
    "zone": lambda stored: " ".join(delivery.zone for delivery in stored.deliveries),
    "notify": lambda stored: " ".join(
        str(each.notify.name) if each.notify else "-" for each in stored.deliveries
    ),
    "orcpt": lambda stored: " ".join(each.orcpt or "-" for each in stored.deliveries),
    "release": lambda stored: " ".join(f"{each.next_attempt:.0f}" for each in stored.deliveries),
    "born": lambda stored: " ".join(f"{each.created:.0f}" for each in stored.deliveries),
}
_SHORTHAND = re.compile(r"\{(base64|\d+) ([^}]*)\}")


class Stage:
    """One transcript as it is played. `talk` is whose turn it is."""

    def __init__(self, house: House, directory: Path, gate: threading.Event) -> None:
        self.house = house
        self.gate = gate
        self.directory = directory
        self.clients: list[Talk] = []
        self.pending = b""
        self.draining: asyncio.Future[None] = asyncio.Future()

    @property
    def talk(self) -> Talk:
        return self.clients[-1]

    async def play(self, step: Step) -> None:
        if step.kind in ("C", "R"):
            self.pending += written(step.rest).encode() + b"\r\n" if step.kind == "C" else octets(step.rest)
            return
        if self.pending:
            self.talk.send(self.pending)
            self.pending = b""
        match step.kind:
            case "flush":
                await self.arrived()
            case "connect":
                self.clients.append(await self.house.connect_raw())
            case "leave":
                await self.clients.pop().close()
            case "reset":
                self.clients.pop().reset()
            case "answer":
                self.gate.set()
            case "silence":
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(self.talk.reader.read(1), 0.03)
            case "drain":
                self.house.listener.stop_accepting()
                self.draining = asyncio.ensure_future(self.house.listener.drain(float(step.rest)))
            case "draining" | "drained":
                done, _ = await asyncio.wait([self.draining], timeout=0.03 if step.kind == "draining" else 5)
                assert bool(done) is (step.kind == "drained"), step
            case "half-close":
                self.talk.writer.write_eof()
            case "T":
                await self.talk.start_tls(client_context(step.rest, self.directory))
            case "S" | "E" | "X":
                await self.hear(step)
            case "store":
                break_store(self.house.store, step.rest, self.gate)
            case _:
                await self.check(step)

    async def arrived(self) -> None:
        """What the client has sent is with the session: both are on this loop."""
        await until(lambda: not any(each.writer.transport.get_write_buffer_size() for each in self.clients))
        await asyncio.sleep(0.002)

    async def hear(self, step: Step) -> None:
        match step.kind:
            case "S":
                line, wanted = (await self.talk.line()).decode(), written(step.rest)
                matches = line == wanted or ("*" in wanted and fnmatch.fnmatchcase(line, wanted))
                assert matches, f"{step}: got {line!r}"
            case "E":
                offered = (await self.talk.reply()).decode().split("\n")
                assert offered[:2] == ["250-relay.example.org", "250-PIPELINING"], (step, offered)
                keywords = {line[4:].split(" ")[0] for line in offered}
                for word in step.rest.split():
                    assert (word.removeprefix("!") in keywords) is not word.startswith("!"), (step, offered)
            case "X":
                said, last = await self.talk.closed(), octets(step.rest.removesuffix("*"))
                assert said.startswith(last) if step.rest.endswith("*") else said == last, step

    async def check(self, step: Step) -> None:
        house, rest = self.house, step.rest
        stored = house.store.stored
        match step.kind:
            case "M":
                assert stored[-1].body.endswith(b"\r\n" + octets(rest)), (step, stored[-1].body)
            case "H":
                fields = unfolded(stored[-1].body)
                found = any(fnmatch.fnmatchcase(field, rest.removeprefix("!")) for field in fields)
                assert found is not rest.startswith("!"), (step, fields)
            case "N":
                await until(lambda: len(stored) >= int(rest))
                assert len(stored) == int(rest), step
            case "A":
                await until(lambda: house.store.aborted == int(rest))
            case "F":
                envelope = stored[-1].message.envelope
                recipients = ",".join(recipient.address for recipient in envelope.recipients)
                assert f"{envelope.sender} > {recipients}" == rest, step
            case "D":
                name, _, wanted = rest.partition(" = ")
                assert FACTS[name](stored[-1]) == wanted, (step, FACTS[name](stored[-1]))
            case "L":
                await until(lambda: bool(house.log.reasons()))
                assert house.log.reasons()[-1] == rest, (step, house.log.entries)
            case kind:
                assert kind in STAGE, f"{step}: not a step"


def written(text: str) -> str:
    """With what shorthands stand for."""

    def long(match: re.Match[str]) -> str:
        if match[1] == "base64":
            return base64.b64encode(octets(match[2])).decode()
        return match[2] * int(match[1])

    return _SHORTHAND.sub(long, text)


def octets(text: str) -> bytes:
    text = written(text)
    return bytes(ast.literal_eval(f"b'{text}'")) if text.isascii() else text.encode()


def unfolded(body: bytes) -> list[str]:
    header, _, _ = body.partition(b"\r\n\r\n")
    return re.sub(rb"\r\n[ \t]+", b" ", header).decode().split("\r\n")


def break_store(store: RememberingStore, how: str, gate: threading.Event) -> None:
    async def fail() -> None:
        if how in ("hold", "lost"):
            await until(gate.is_set)
        if how in STORE_ERRORS:
            raise STORE_ERRORS[how]

    if how == "slow":
        store.before_write, store.before_commit = lambda: asyncio.sleep(0.001), lambda: asyncio.sleep(0.02)
    elif how in ("hold", "lost"):
        gate.clear()
        store.before_write = store.before_commit = fail
    elif how == "sick":
        store.sick = Unhealthy.NO_SPACE
    else:
        store.before_commit = fail


async def act(path: Path, directory: Path) -> None:
    steps, gate = load(path), threading.Event()
    async with staged(steps, directory, gate) as house:
        stage = Stage(house, directory, gate)
        stage.clients.append(await house.connect_raw())
        try:
            for step in steps:
                await stage.play(step)
        finally:
            for talk in stage.clients:
                await talk.close()
        bugs = [step for step in steps if step.kind == "store" and step.rest in ("bug", "lost")]
        assert len(house.log.named("trouble")) == len(bugs), house.log.entries


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("path", TRANSCRIPTS, ids=[path.stem for path in TRANSCRIPTS])
def test_transcript(path: Path, run: Callable[..., None], tmp_path: Path) -> None:
    """The relay runs on uvloop, whose transports differ in type, buffers and end-of-file."""
    run(act(path, tmp_path))


def test_there_are_transcripts() -> None:
    assert len(TRANSCRIPTS) >= 250
