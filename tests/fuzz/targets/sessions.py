"""A whole session: everything from the first octet to the stored message.

Invariants: every reply is well formed; every command, body and chunk is answered exactly once, in order,
until the session is closed with a reply that says so; nothing is trouble of ours; what is stored was
acknowledged, and the other way round, has CRLF line ends and somebody to go to; whatever the octets'
packets, memory is bounded and nothing is left.
"""

import asyncio
import functools
import re

from tests.fuzz.conversation import TURNS_PER_PACKET, Conversation, converse
from tests.fuzz.targets.bodies import no_bare_line_ends
from tests.fuzz.targets.tls import context
from tests.support.inbound import is_well_formed
from zonerelay.config import settings as options
from zonerelay.config.settings import BareLineEnds, ListenerAuth, ListenerSettings, ListenerTls
from zonerelay.inbound.tls.certificates import Certificates
from zonerelay.inbound.tls.channel import TlsChannel
from zonerelay.smtp.server.proxy_protocol import ProxyFault, ProxyReader

PACKET_END = b"\x1e"
MAX_PACKETS = 100
OUR_FIELDS = 1000  # octets: more than what we put in front of a message
EVERYBODY = ["192.0.2.0/24"]


def session(data: bytes) -> None:
    """The first line says what the listener is (see `settings`); then packets, PACKET_END between them."""
    words, _, rest = data.partition(b"\n")
    chosen = settings(frozenset(words.decode("latin-1").split()))
    packets = rest.split(PACKET_END)[:MAX_PACKETS]
    certificates = OneCertificate() if chosen.tls is not ListenerTls.NONE else None
    turns = 2 if b"hasty" in words else TURNS_PER_PACKET
    heard = loop().run_until_complete(
        converse(packets, settings=chosen, certificates=certificates, turns=turns)
    )
    assert heard.log.named("trouble") == []
    _check_replies(heard, b"".join(packets), proxied=bool(chosen.proxy_networks))
    _check_store(heard, chosen)


@functools.cache
def settings(words: frozenset[str]) -> ListenerSettings:
    from ipaddress import ip_network

    everybody = (ip_network("192.0.2.0/24"),)
    auth = ListenerAuth.REQUIRED if "auth" in words else ListenerAuth.OPTIONAL
    offered = not words.isdisjoint(("auth", "may-auth"))
    return ListenerSettings(
        tls=ListenerTls.STARTTLS if "starttls" in words else ListenerTls.NONE,
        require_tls="require-tls" in words and "starttls" in words,
        auth=auth if offered else ListenerAuth.OFF,
        unsafe=(options.UnsafeListener.CLEARTEXT_AUTH,) if offered else (),
        allow_networks=() if "closed" in words else everybody,
        proxy_networks=everybody if "proxy" in words else (),
        xclient_networks=everybody if "xclient" in words else (),
        bare_line_ends=BareLineEnds.REJECT if "reject" in words else BareLineEnds.NORMALIZE,
        max_message_size=2000,
        max_header_size=1000,
        max_received=3,
        max_errors=10,
        max_recipients=2,
    )


class OneCertificate(Certificates):
    """Certificates without files."""

    def __init__(self) -> None:
        return

    def channel(self) -> TlsChannel:
        return TlsChannel(context())


@functools.cache
def loop() -> asyncio.AbstractEventLoop:
    """One for all inputs: making one costs more than most conversations."""
    return asyncio.new_event_loop()


def _check_replies(heard: Conversation, sent: bytes, *, proxied: bool) -> None:
    clear, tls, alert = _before_tls(heard.out)
    assert clear.endswith(b"\r\n") or not clear
    replies = split_replies(clear)
    assert all(is_well_formed(line) for reply in replies for line in reply.split(b"\n")), replies
    account = Account(_behind_proxy_header(sent) if proxied else sent)
    if not replies:
        assert proxied
        return
    assert replies[0].startswith(b"220 ")
    for number, reply in enumerate(replies[1:], start=2):
        last = number == len(replies)
        assert account.take(reply) or (last and heard.closed and _says_goodbye(reply)), reply
        assert last or not account.over
    assert tls == account.over or not tls
    assert account.over or heard.closed or account.owes_nothing()
    assert not (heard.closed and not account.over) or _says_goodbye(replies[-1]) or alert, replies


def _before_tls(out: bytes) -> tuple[bytes, bool, bool]:
    """What was said in clear text; whether TLS followed."""
    found = re.search(rb"(?:^|\r\n)([\x14-\x17]\x03)", out)
    return (out, False, False) if found is None else (out[: found.start(1)], True, True)


def _behind_proxy_header(sent: bytes) -> bytes:
    reader = ProxyReader()
    try:
        reader.feed(sent)
    except ProxyFault:
        return b""
    return reader.rest


def _says_goodbye(reply: bytes) -> bool:
    """221, 421, or a refusal: of what is no SMTP, where framing is lost, of a chunk too long to be read."""
    return reply[:3] in (b"221", b"421") or reply.startswith(b"5")


def _check_store(heard: Conversation, chosen: ListenerSettings) -> None:
    store = heard.store
    assert len(store.stored) == len(re.findall(rb"queued as", heard.out))
    assert store.begun == store.aborted + len(store.stored)
    for stored in store.stored:
        no_bare_line_ends(stored.body)
        assert len(stored.body) <= chosen.max_message_size + OUR_FIELDS
        assert 0 < len(stored.deliveries) <= chosen.max_recipients


END_OF_DATA = b"\r\n.\r\n"

_BDAT = re.compile(rb"BDAT +([0-9]{1,20})(?: +LAST)? *\Z", re.IGNORECASE)


def split_replies(out: bytes) -> list[bytes]:
    """Whole replies, with all their lines."""
    replies, lines = [], []
    for line in out.split(b"\r\n")[:-1]:
        lines.append(line)
        if line[3:4] != b"-":
            replies.append(b"\n".join(lines))
            lines = []
    assert not lines, "a reply has no end"
    return replies


class Account:
    """Which replies a conversation is owed. Goes through the client's octets, one reply at a time.

    Knows only RFC 5321, 3030, 4954 and 3207: a line is answered once, a body once at its end, a chunk once
    behind its octets. It believes the server's codes and checks that each has its place. `over`: TLS begins,
    and nothing can be read.
    """

    def __init__(self, sent: bytes) -> None:
        self._left = sent
        self._in_body = False
        self._in_exchange = False  # the next line is a SASL response, whatever it looks like
        self.over = False

    def take(self, reply: bytes) -> bool:
        """Whether this reply was owed."""
        if self._in_body:
            return self._take_body()
        line, end, self._left = self._left.partition(b"\n")
        if not end:
            return False
        code = reply[:3]
        chunk = None if self._in_exchange else _BDAT.match(line.removesuffix(b"\r"))
        self._in_exchange = code == b"334"
        if code == b"354":
            self._in_body = True
        elif chunk is not None:
            size = int(chunk[1])
            whole, self._left = size <= len(self._left), self._left[size:]
            return whole
        elif code == b"220" and line.upper().startswith(b"STARTTLS"):
            self.over = True
        return True

    def owes_nothing(self) -> bool:
        """No command and no body is there whole without its answer."""
        if self._in_body:
            return END_OF_DATA not in b"\r\n" + self._left
        line, end, rest = self._left.partition(b"\n")
        chunk = None if self._in_exchange else _BDAT.match(line.removesuffix(b"\r"))
        return not end or (chunk is not None and int(chunk[1]) > len(rest))

    def _take_body(self) -> bool:
        _, end, self._left = (b"\r\n" + self._left).partition(END_OF_DATA)
        self._in_body = False
        return end != b""
