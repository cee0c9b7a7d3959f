"""sendmail(1): programs hand mail in by standard input, and the relay on this machine gets it over SMTP.

Promise: status 0 means that the relay has the message for all recipients, or that it is a synced file in the
drop directory, from which a relay takes it that does not answer now. With any other status it is for none,
and standard error says why; 75 (EX_TEMPFAIL) is worth another try, which comes twice if the connection was
lost after the message was sent. The statuses are those of sysexits.h.
Addresses without a domain, and those at this machine's name, are looked up in the file of aliases.
The module imports nothing of the relay and little of Python: a program waits for each start.
"""

from __future__ import annotations

import contextlib
import getopt
import os
import pwd
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import BinaryIO

OK, USAGE, DATAERR, NOUSER, UNAVAILABLE = 0, 64, 65, 67, 69
OSERR, IOERR, TEMPFAIL, NOPERM, CONFIG = 71, 74, 75, 77, 78

CONFIGS = ("/etc/zonerelay/zonerelay.toml", "config/zonerelay.toml")
DEFAULT_LISTENER = "127.0.0.1:2525"
CONNECT_TIMEOUT, REPLY_TIMEOUT = 30.0, 600.0
MAX_LINE = 4096
"""Octets of a line of a reply."""
DROP, ALIASES = "/var/spool/zonerelay", "/etc/aliases"
MAX_ALIASES = 10
"""Aliases that lead from one to the next."""

_OPTIONS = "B:F:GL:N:O:R:UV:X:b:f:h:imno:p:qr:tvx"
_REFUSED = {
    "-bd": "the relay itself is started with zonerelay serve",
    "-q": "the relay tries what waits by itself; to try it now: zonerelay queue retry --all",
}
_FIELD = re.compile(rb"[!-9;-~]+[ \t]*:.*\n(?:[ \t].*\n)*")
_ADDRESS = re.compile(r'(?:"(?:\\.|[^"\\])*"|[^,])+')
"""An argument has several with commas between them, as cron writes what MAILTO says."""
_WISHES = {"-R": "RET", "-V": "ENVID", "-N": "NOTIFY"}
"""The parameters of RFC 3461; NOTIFY is one of each recipient."""


class SendmailError(Exception):
    """Why the message was not taken, with the status to exit with."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class AwayError(SendmailError):
    """The relay does not answer: it has nothing of the message."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command, also under the names mailq and newaliases. Returns the status."""
    words = sys.argv[1:] if argv is None else argv
    try:
        match os.path.basename(sys.argv[0]):
            case "mailq":
                words = ["-bp"]
            case "newaliases":
                words = ["-bi"]
        return _sendmail(words)
    except SendmailError as error:
        print(f"sendmail: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return TEMPFAIL


def _sendmail(words: Sequence[str]) -> int:
    try:
        pairs, recipients = getopt.getopt(list(words), _OPTIONS)
    except getopt.GetoptError as error:
        raise SendmailError(USAGE, str(error)) from None
    options = dict(pairs)
    mode = options.get("-b", "m")
    if reason := _REFUSED.get("-q" if "-q" in options else f"-b{mode}"):
        raise SendmailError(USAGE, reason)
    if mode == "i":
        return OK  # there is no table of aliases to rebuild
    if mode == "p":
        _show_queue()
    settings = _settings()
    if mode == "s":
        return _pass_on(_connect(listener_of(settings)))
    if mode != "m":
        raise SendmailError(USAGE, f"-b{mode} is not supported")
    domain = _domain(settings)
    sender = options.get("-f", options.get("-r"))
    sender = f"{_user()}@{domain}" if sender is None else _qualified(sender, domain)
    message = _read(sys.stdin.buffer, dots_end="-i" not in options and ("-o", "i") not in pairs)
    header, body = _split(message)
    recipients = [each.strip() for word in recipients for each in _ADDRESS.findall(word)]
    if "-t" in options:
        recipients += _recipients(header)
        header = re.sub(rb"(?im)^Bcc[ \t]*:.*\n(?:[ \t].*\n)*", b"", header)
    recipients = _aliased(
        [_qualified(each, domain) for each in recipients], domain, _option(settings, "aliases")
    )
    if not recipients:
        raise SendmailError(USAGE, "no recipients: name them, or use -t with To, Cc or Bcc in the header")
    if not re.search(rb"(?im)^From[ \t]*:", header):
        header = _from(sender or f"MAILER-DAEMON@{domain}", options.get("-F", "")) + header
    wishes = {name: options.get(option, "") for option, name in _WISHES.items()}
    for each in (sender, *recipients, *wishes.values()):
        if not each.isprintable() or " " in each:
            raise SendmailError(DATAERR, f"{each!r}: no space and no control character can be in it")
    _hand_over(settings, sender, recipients, header + body, wishes)
    return OK


def _hand_over(
    settings: dict[str, object],
    sender: str,
    recipients: Sequence[str],
    message: bytes,
    wishes: Mapping[str, str],
) -> None:
    try:
        submit(listener_of(settings), sender, recipients, message, wishes)
    except AwayError:
        drop = _option(settings, "drop")
        if not os.path.isdir(os.path.join(drop, "new")):
            raise
        _drop(drop, sender, recipients, message, wishes)


def _read(stream: BinaryIO, *, dots_end: bool) -> bytes:
    """The message with LF line ends; a line with a dot alone ends it, unless -i says otherwise."""
    try:
        message = stream.read().replace(b"\r\n", b"\n")
    except OSError as error:
        raise SendmailError(IOERR, f"standard input cannot be read: {error.strerror}") from None
    if dots_end and (end := re.search(rb"(?m)^\.$", message)):
        message = message[: end.start()]
    return message if not message or message.endswith(b"\n") else message + b"\n"


def _split(message: bytes) -> tuple[bytes, bytes]:
    """The header, and the body with the empty line before it, which is added where it is missing."""
    end = 0
    while field := _FIELD.match(message, end):
        end = field.end()
    return message[:end], (b"" if message.startswith(b"\n", end) else b"\n") + message[end:]


def _recipients(header: bytes) -> list[str]:
    """The addresses of To, Cc and Bcc (RFC 5322 3.6.3)."""
    from email.utils import getaddresses

    unfolded = re.sub(rb"\n(?=[ \t])", b"", header)
    fields = re.findall(rb"(?im)^(?:To|Cc|Bcc)[ \t]*:(.*)$", unfolded)
    pairs = getaddresses([each.decode("utf-8", "replace") for each in fields])
    return [address for _, address in pairs if address]


def _from(author: str, name: str) -> bytes:
    """A From field (RFC 5322 3.6.2)."""
    if name.isprintable() and name and author.isascii():
        from email.utils import formataddr

        author = formataddr((name, author))
    return f"From: {author}\n".encode()


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise SendmailError(OSERR, f"user {os.getuid()} has no name: use -f") from None


def _qualified(address: str, domain: str) -> str:
    address = address.removeprefix("<").removesuffix(">")
    return address if "@" in address or not address else f"{address}@{domain}"


def _domain(settings: dict[str, object]) -> str:
    try:
        with open("/etc/mailname", encoding="ascii") as file:
            name = file.read().strip()
    except (OSError, ValueError):
        name = ""
    return name or str(settings.get("hostname") or "") or socket.getfqdn()


def _settings() -> dict[str, object]:
    """The relay's configuration; empty if this user may not read it, for its defaults may do."""
    import tomllib

    for path in (os.environ.get("ZONERELAY_CONFIG"), *CONFIGS):
        try:
            if path:
                with open(path, "rb") as file:
                    return tomllib.load(file)
        except FileNotFoundError:
            continue
        except OSError:
            return {}
        except tomllib.TOMLDecodeError as error:
            raise SendmailError(CONFIG, f"{path}: {error}") from None
    return {}


def _option(settings: dict[str, object], name: str) -> str:
    """A path of [sendmail]; "" where the configuration says so."""
    table = settings.get("sendmail")
    return str((table if isinstance(table, dict) else {}).get(name, {"drop": DROP, "aliases": ALIASES}[name]))


def _aliased(recipients: Sequence[str], domain: str, path: str) -> list[str]:
    """Replaces the users of this machine by what aliases(5) says of them."""
    known: dict[str, list[str]] = {}
    try:
        with open(path, encoding="utf-8") as file:
            text = re.sub(r"\n[ \t]+", " ", re.sub(r"(?m)^[ \t]*#.*\n?", "", file.read()))
    except OSError:
        text = ""  # without a file there is no alias
    for line in text.splitlines():
        name, found, value = line.partition(":")
        if found:
            known[name.strip().strip('"').lower()] = [each.strip().strip('"') for each in value.split(",")]
    ours = {domain.lower(), socket.gethostname().lower(), "localhost"}
    result: dict[str, None] = {}

    def add(address: str, depth: int) -> None:
        local, _, host = address.rpartition("@")
        values = known.get(local.lower()) if host.lower() in ours and depth < MAX_ALIASES else None
        if not values:
            result[address] = None
        for each in values or ():
            if each[:1] in ("|", "/", ":"):
                raise SendmailError(CONFIG, f"{path}: {local} leads to {each}: only addresses are supported")
            target = _qualified(each.removeprefix("\\"), domain)
            # A name that leads to itself, as in "root: root, admin@example.com", is the address itself.
            add(target, MAX_ALIASES if target.lower() == address.lower() else depth + 1)

    for each in recipients:
        add(each, 0)
    return list(result)


def _drop(
    directory: str, sender: str, recipients: Sequence[str], message: bytes, wishes: Mapping[str, str]
) -> None:
    """Leaves the message for a relay that does not answer now; `inbound/drop_directory` takes it."""
    name = os.urandom(16).hex()
    draft = os.path.join(directory, "tmp", name)
    lines = [
        f"S{sender}",
        *(f"R{each}" for each in recipients),
        *(f"W{k}={v}" for k, v in wishes.items() if v),
    ]
    content = "\n".join((DROP_FORMAT, *lines, "", "")).encode() + message
    try:
        os.umask(0o027)  # the directory is setgid: the relay's group reads the file
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o640), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.rename(draft, os.path.join(directory, "new", name))
            # The directory cannot be opened by its users; this sync takes the new name along.
            os.fsync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        reason = f"{directory} cannot be written: {error.strerror}"
        raise SendmailError(TEMPFAIL, f"the relay does not answer, and {reason}") from None


DROP_FORMAT = "zonerelay drop 1"
MAX_ENVELOPE = 1024 * 1024


def parse_dropped(content: bytes) -> tuple[str, list[str], dict[str, str], bytes]:
    """Returns sender, recipients, wishes and message of a file that `_drop` has written, or raises
    ValueError.
    """
    end = content.find(b"\n\n", 0, MAX_ENVELOPE)
    first, *lines = content[: max(end, 0)].decode().split("\n")
    if first != DROP_FORMAT or end < 0:
        raise ValueError("not a message of sendmail(1)")
    sender, recipients, wishes = "", list[str](), dict[str, str]()
    for line in lines:
        kind, value = line[:1], line[1:]
        if not value.isprintable() or " " in value:
            raise ValueError(f"{line!r}: no space and no control character can be in it")
        if kind == "S":
            sender = value
        elif kind == "R":
            recipients.append(value)
        elif kind == "W" and value.partition("=")[0] in _WISHES.values():
            wishes[value.partition("=")[0]] = value.partition("=")[2]
        else:
            raise ValueError(f"{line!r} is not known")
    if not recipients:
        raise ValueError("no recipients")
    return sender, recipients, wishes, content[end + 2 :]


def _pass_on(connection: socket.socket) -> int:
    """SMTP on standard input and output: the relay's own, octet by octet."""
    import select

    source, target = sys.stdin.fileno(), sys.stdout.fileno()
    waiting: list[int] = [source, connection.fileno()]
    while connection.fileno() in waiting:
        ready, _, _ = select.select(waiting, [], [], REPLY_TIMEOUT)
        if not ready:
            return TEMPFAIL
        if connection.fileno() in ready:
            if not (octets := connection.recv(65536)):
                return OK
            while octets:
                octets = octets[os.write(target, octets) :]
        if source in ready:
            if octets := os.read(source, 65536):
                connection.sendall(octets)
            else:
                waiting.remove(source)
                connection.shutdown(socket.SHUT_WR)
    return OK


def listener_of(settings: dict[str, object]) -> str:
    """The address of the first listener that takes mail of this machine in clear text without a log-in."""
    listeners = settings.get("listener") or [{}]
    for each in listeners if isinstance(listeners, list) else []:
        closed = each.get("tls") == "implicit" or each.get("require_tls") or each.get("auth") == "required"
        if not closed and not each.get("proxy_networks"):
            return str(each.get("address", DEFAULT_LISTENER))
    raise SendmailError(CONFIG, "no [[listener]] of the relay takes mail without TLS and a log-in")


def _connect(address: str) -> socket.socket:
    try:
        if address.startswith("unix:"):
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(CONNECT_TIMEOUT)
            connection.connect(address.removeprefix("unix:"))
        else:
            host, _, port = address.rpartition(":")
            here = {"0.0.0.0": "127.0.0.1", "[::]": "::1"}.get(host, host.strip("[]"))
            connection = socket.create_connection((here, int(port)), CONNECT_TIMEOUT)
    except OSError as error:
        reason = error.strerror or error
        raise AwayError(TEMPFAIL, f"the relay at {address} does not answer: {reason}") from None
    connection.settimeout(REPLY_TIMEOUT)
    return connection


def submit(
    address: str, sender: str, recipients: Sequence[str], message: bytes, wishes: Mapping[str, str]
) -> None:
    """One transaction. Raises SendmailError."""
    with _connect(address) as connection, connection.makefile("rb") as replies:

        def ask(command: bytes, what: str, refused: int = UNAVAILABLE) -> str:
            try:
                connection.sendall(command)
                code, text = _reply(replies)
            except OSError as error:
                reason = error.strerror or error
                raise SendmailError(TEMPFAIL, f"the connection to the relay is lost: {reason}") from None
            if code[0] not in "23":
                status = TEMPFAIL if code[0] == "4" else NOPERM if " 5.7." in text else refused
                raise SendmailError(status, f"the relay refuses {what}: {text}")
            return text.upper()

        try:
            ask(b"", "the connection")
        except SendmailError as error:
            if error.status != TEMPFAIL:
                raise
            raise AwayError(TEMPFAIL, str(error)) from None  # it stops, or has no room now
        offered = ask(b"EHLO localhost\r\n", "EHLO")
        parameters = " BODY=8BITMIME" if "8BITMIME" in offered and not message.isascii() else ""
        if not "".join((sender, *recipients)).isascii():
            parameters += " SMTPUTF8"
        given = {name: f" {name}={value}" for name, value in wishes.items() if value}
        notify = given.pop("NOTIFY", "")
        parameters += "".join(given.values())
        ask(f"MAIL FROM:<{sender}>{parameters}\r\n".encode(), f"the sender {sender}", DATAERR)
        for each in recipients:
            ask(f"RCPT TO:<{each}>{notify}\r\n".encode(), f"the recipient {each}", NOUSER)
        ask(b"DATA\r\n", "the message")
        stuffed = re.sub(rb"(?m)^\.", b"..", message).replace(b"\n", b"\r\n")
        ask(stuffed + b".\r\n", "the message", DATAERR)
        with contextlib.suppress(OSError):
            connection.sendall(b"QUIT\r\n")


def _reply(replies: BinaryIO) -> tuple[str, str]:
    """The code and the text of a reply (RFC 5321 4.2). Raises OSError when it is none."""
    lines = []
    while True:
        line = replies.readline(MAX_LINE).decode("utf-8", "replace").rstrip("\r\n")
        if not re.match(r"[2-5]\d\d(?: |-|$)", line):
            raise OSError(f"no reply, but {line!r}" if line else "closed by the relay")
        lines.append(line)
        if line[3:4] != "-":
            return line[:3], " / ".join(lines)


def _show_queue() -> None:
    """Becomes `zonerelay queue list`."""
    program = "/usr/bin/zonerelay"
    beside = os.path.join(sys.prefix, "bin", "zonerelay")
    if os.path.exists(beside):
        program = beside
    os.execv(program, [program, "queue", "list"])  # noqa: S606
