"""Implements sendmail(1): reads a message from standard input and submits it to the local relay over SMTP.

Promise: status 0 means that the relay has accepted the message for all recipients, or that the message is a
synced file in the drop directory, from which a relay that does not answer now will read it. With any other
status the message was accepted for no recipient, and standard error has the reason. Status 75 (EX_TEMPFAIL)
means that a retry may succeed; the message is then duplicated if the connection was lost after it was sent.
The statuses are those of sysexits.h.

Addresses without a domain, and those at this machine's name, are looked up in the aliases file. Of the relay,
the module imports only the address parser, and little of the standard library, because programs wait for each
start.
"""

import contextlib
import os
import pwd
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from zonerelay.model.address_list import read_addresses, recipient_fields

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

_FLAGS, _VALUED = "GIUcimntvx", "ABCFLNORXbefhopr"
"""The options of Postfix; of those, -q has a value only in the same word, and -V may lack one."""
_FIELD = re.compile(rb"[!-9;-~]+[ \t]*:.*\n(?:[ \t].*\n)*")
_ADDRESSES = re.compile("(?:resent-)?(?:from|sender|reply-to|to|cc)")
_WISHES = {"R": "RET", "V": "ENVID", "N": "NOTIFY"}
"""The parameters of RFC 3461; NOTIFY is one of each recipient."""


class SendmailError(Exception):
    """The message was not accepted; contains the reason and the exit status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class RelayDownError(SendmailError):
    """The relay does not respond, and has not received any part of the message."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run sendmail(1), or mailq or newaliases if it is called by that name. Return the exit status."""
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
    options, arguments = _options(words)
    mode = "i" if "I" in options else options.get("b", "m")
    if mode == "d":
        raise SendmailError(USAGE, "start the relay itself with zonerelay serve")
    if mode == "i" or "q" in options:
        return OK  # there is no alias database to rebuild, and the relay retries waiting mail by itself
    if mode == "p":
        _show_queue()
    if mode not in ("m", "s", "v"):
        raise SendmailError(USAGE, f"-b{mode} is not supported")
    if sys.stdin is None and mode != "v":
        raise SendmailError(IOERR, "standard input is closed")
    settings = _settings()
    if mode == "s":
        return _pass_on(_connect(listener_of(settings)))
    return _send(settings, options, arguments, verifies=mode == "v")


def _send(
    settings: dict[str, object], options: dict[str, str], arguments: Sequence[str], *, verifies: bool
) -> int:
    domain = _domain(settings)
    sender = options.get("f", options.get("r"))
    if sender is not None:
        sender = _sender(sender, domain)
    recipients = [each for word in arguments for each in _readable(word, "the arguments")]
    aliases = _option(settings, "aliases")
    if verifies:
        recipients = _aliased([_qualified(each, domain) for each in recipients], domain, aliases)
        return _verify(settings, sender or "", recipients)
    message = _read(sys.stdin.buffer, dots_end="i" not in options)
    fields, body = _split(message)
    if "t" in options:
        recipients += _recipients(fields)
    if sender is None:
        sender = _user(fields, domain)
    fields = [_complete(each, domain) for each in fields if _name(each) not in ("bcc", "resent-bcc")]
    recipients = _aliased([_qualified(each, domain) for each in recipients], domain, aliases)
    if not recipients:
        raise SendmailError(*_no_recipients(bool(arguments), "t" in options))
    if not any(_name(each) == "from" for each in fields):
        fields.insert(0, _from(sender or f"MAILER-DAEMON@{domain}", options.get("F", "")))
    wishes = {name: options.get(option, "") for option, name in _WISHES.items()}
    wishes["ENVID"] = _xtext(wishes["ENVID"])
    for each in (sender, *recipients, *wishes.values()):
        if not each.isprintable() or " " in each:
            raise SendmailError(DATAERR, f"{each!r}: spaces and control characters are not allowed")
    message, drop = b"".join(fields) + body, _option(settings, "drop")
    try:
        submit(listener_of(settings), sender, recipients, message, wishes)
    except RelayDownError:
        if not os.path.isdir(os.path.join(drop, "new")):
            raise
        _drop(drop, sender, recipients, message, wishes)
    return OK


def _options(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Parse the command line, and return its options and its other arguments."""
    options, arguments = dict[str, str](), list[str]()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return options, arguments + rest
        if word[:1] != "-" or word == "-":
            arguments.append(word)
            continue
        at = 1
        while at < len(word):
            option, value, at = word[at], word[at + 1 :], at + 1
            if option in _FLAGS:
                options[option] = ""
                continue
            if option == "V" and not value and (not rest or len(rest[0]) == 2):
                break  # -V, alone or before the delimiters of VERP: old programs use it
            if option in _VALUED or option == "V":
                if not value and not rest:
                    raise SendmailError(USAGE, f"option -{option} requires a value")
                value = value or rest.pop(0)
            elif option != "q":
                raise SendmailError(USAGE, f"unknown option -{option}")
            if option == "o":
                option, value = ("i", "") if value == "i" else ("o", value)
            options[option] = value
            break
    return options, arguments


def _readable(text: str, where: str) -> list[str]:
    """Return the valid addresses in a string that lists addresses. Invalid ones are reported and skipped."""
    found = []
    for entry in read_addresses(text).entries:
        if entry.address and " " not in entry.address:
            found.append(entry.address)
        else:
            words = f"{entry.text[:200]!r} in {where} is not a valid address; it is skipped"
            print(f"sendmail: {words}", file=sys.stderr)
    return found


def _no_recipients(has_arguments: bool, reads_header: bool) -> tuple[int, str]:
    if has_arguments:
        why = "no valid address was found (spaces and control characters are not allowed)"
        return DATAERR, f"no recipients: {why}"
    if reads_header:
        why = "To, Cc and Bcc of the header (or Resent-To, -Cc, -Bcc) contain no address"
        return USAGE, f"no recipients: {why}"
    return USAGE, "no recipients: specify them, or use -t with To, Cc or Bcc in the header"


def _sender(text: str, domain: str) -> str:
    if text.strip() in ("", "<>"):
        return ""
    entries = read_addresses(text).entries
    if len(entries) != 1 or not entries[0].address:
        raise SendmailError(
            USAGE, f"-f {text!r} is not a single address; use for example -f user@example.org"
        )
    return _qualified(entries[0].address, domain)


def _verify(settings: dict[str, object], sender: str, recipients: Sequence[str]) -> int:
    """Run -bv: check each recipient with the relay, and send nothing."""
    if not recipients:
        raise SendmailError(*_no_recipients(has_arguments=False, reads_header=False))
    status = OK
    for each in recipients:
        try:
            submit(listener_of(settings), sender, [each], None, {})
            print(f"{each} ... deliverable: the relay accepts it")
        except RelayDownError:
            raise
        except SendmailError as error:
            print(f"{each} ... {error}")
            status = error.status
    return status


def _read(stream: BinaryIO, *, dots_end: bool) -> bytes:
    """Read the message, and return it with LF line ends. A line with a single dot ends it, unless -i is
    given.
    """
    try:
        message = stream.read().replace(b"\r\n", b"\n")
    except OSError as error:
        raise SendmailError(IOERR, f"standard input cannot be read: {error.strerror}") from None
    if dots_end and (end := re.search(rb"(?m)^\.$", message)):
        message = message[: end.start()]
    return message if not message or message.endswith(b"\n") else message + b"\n"


def _split(message: bytes) -> tuple[list[bytes], bytes]:
    """Split a message into its header fields and its body, which includes the empty line before it."""
    fields = list[bytes]()
    end = 0
    # Mailboxes, and programs that write them, begin with a "From " line.
    while mailbox_line := re.compile(rb">?From .*\n").match(message, end):
        end = mailbox_line.end()
    if end and not _FIELD.match(message, end):
        end = 0
    while field := _FIELD.match(message, end):
        fields.append(field[0])
        end = field.end()
    return fields, (b"" if message.startswith(b"\n", end) else b"\n") + message[end:]


def _name(field: bytes) -> str:
    return field.partition(b":")[0].rstrip().lower().decode()


def _value(field: bytes) -> str:
    return field.partition(b":")[2].decode("utf-8", "surrogateescape")


def _recipients(fields: Sequence[bytes]) -> list[str]:
    found = list[str]()
    for at in recipient_fields([_name(each) for each in fields]):
        found += _readable(_value(fields[at]), fields[at].partition(b":")[0].decode())
    return found


def _complete(field: bytes, domain: str) -> bytes:
    """Return an address field with the domain appended to addresses that have none (RFC 5322, section
    3.4.1).
    """
    if not _ADDRESSES.fullmatch(_name(field)):
        return field
    value, pieces, begin = _value(field), list[str](), 0
    for entry in read_addresses(value).entries:
        if entry.address and "@" not in entry.address:
            pieces += (value[begin : entry.end], f"@{domain}")
            begin = entry.end
    whole = field[: field.index(b":") + 1].decode() + "".join(pieces) + value[begin:]
    return whole.encode("utf-8", "surrogateescape")


def _from(author: str, name: str) -> bytes:
    """Return a From field with the author's address and name (RFC 5322, section 3.6.2). A non-ASCII name is
    written as encoded words (RFC 2047).
    """
    if not name or not name.isprintable():
        return f"From: {author}\n".encode()
    if name.isascii():
        name = '"' + re.sub(r'(["\\])', r"\\\1", name) + '"'
    else:
        from email.header import Header

        name = Header(name, "utf-8", header_name="From").encode()
    return f"From: {name} <{author}>\n".encode()


def _xtext(text: str) -> str:
    """Encode a string as xtext (RFC 3461, section 4)."""
    octets = text.encode("utf-8", "surrogateescape")  # of an argument that is not valid UTF-8
    return re.sub(rb"[^!-*,-<>-~]", lambda found: b"+%02X" % found[0][0], octets).decode()


def _user(fields: Sequence[bytes], domain: str) -> str:
    """Return the address of the user who runs sendmail, or of the message's author if that user has no
    name.
    """
    try:
        return f"{pwd.getpwuid(os.getuid()).pw_name}@{domain}"
    except KeyError:
        values = [_value(each) for each in fields if _name(each) == "from"]
        authors = [entry.address for value in values for entry in read_addresses(value).entries]
        return _qualified(next(filter(None, authors), f"uid-{os.getuid()}"), domain)


def _qualified(address: str, domain: str) -> str:
    return address if "@" in address or not address else f"{address}@{domain}"


def _domain(settings: dict[str, object]) -> str:
    try:
        with open("/etc/mailname", encoding="ascii") as file:
            name = file.read().strip()
    except (OSError, ValueError):
        name = ""
    return name or str(settings.get("hostname") or "") or socket.getfqdn()


def _settings() -> dict[str, object]:
    """Return the relay's configuration, or an empty one if this user may not read it."""
    for path in (os.environ.get("ZONERELAY_CONFIG"), *CONFIGS):
        try:
            if path:
                return _joined(path)
        except FileNotFoundError:
            continue
        except OSError:
            return {}
        except ValueError as error:
            raise SendmailError(CONFIG, f"{path}: {error}") from None
    return {}


def _joined(path: str) -> dict[str, object]:
    """Return the content of the configuration file and of the files in conf.d next to it. Raise OSError or
    ValueError if one is not readable.
    """
    import tomllib

    folder, found = os.path.join(os.path.dirname(path), "conf.d"), dict[str, Any]()
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    for each in (path, *(os.path.join(folder, name) for name in names if name.endswith(".toml"))):
        with open(each, "rb") as file:
            for key, value in tomllib.load(file).items():
                there = found.setdefault(key, value)
                if isinstance(there, dict) and isinstance(value, dict):
                    found[key] = {**value, **there}
                elif isinstance(there, list) and there is not value:
                    there += value
    return found


def _option(settings: dict[str, object], name: str) -> str:
    """Return the path that an option of [sendmail] sets, or "" if the option disables the feature."""
    table = settings.get("sendmail")
    return str((table if isinstance(table, dict) else {}).get(name, {"drop": DROP, "aliases": ALIASES}[name]))


def _aliased(recipients: Sequence[str], domain: str, path: str) -> list[str]:
    """Replace local users by their aliases, according to aliases(5)."""
    known: dict[str, list[str]] = {}
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = re.sub(r"\n[ \t]+", " ", re.sub(r"(?m)^[ \t]*#.*\n?", "", file.read()))
    except OSError:
        text = ""  # without the file there are no aliases
    for line in text.splitlines():
        name, found, value = line.partition(":")
        if found:
            entries = read_addresses(value).entries
            known[name.strip().strip('"').lower()] = [
                (each.address or each.text).strip('"') for each in entries
            ]
    ours = {domain.lower(), socket.gethostname().lower(), "localhost"}
    result: dict[str, None] = {}

    def add(address: str, depth: int) -> None:
        local, _, host = address.rpartition("@")
        values = known.get(local.lower()) if host.lower() in ours and depth < MAX_ALIASES else None
        if not values:
            result[address] = None
        for each in values or ():
            if each[:1] in ("|", "/", ":"):
                raise SendmailError(
                    CONFIG, f"{path}: {local} is an alias of {each}, but only addresses are supported"
                )
            target = _qualified(each.removeprefix("\\"), domain)
            # A name that leads to itself, as in "root: root, admin@example.com", stands for the address
            # itself.
            add(target, MAX_ALIASES if target.lower() == address.lower() else depth + 1)

    for each in recipients:
        add(each, 0)
    return list(result)


def _drop(
    directory: str, sender: str, recipients: Sequence[str], message: bytes, wishes: Mapping[str, str]
) -> None:
    """Write the message to the drop directory, because the relay does not respond; `inbound/drop_directory`
    reads it.
    """
    name = os.urandom(16).hex()
    draft = os.path.join(directory, "tmp", name)
    lines = _commands(sender, recipients, wishes, eight_bit=not message.isascii())
    content = "\n".join((DROP_FORMAT, *lines, "", "")).encode() + message
    try:
        os.umask(0o027)  # the directory is setgid, so that the relay's group can read the file
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o640), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.rename(draft, os.path.join(directory, "new", name))
            # The directory cannot be opened by its users; this sync also makes the new name durable.
            os.fsync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        reason = f"cannot write to {directory}: {error.strerror}"
        raise SendmailError(TEMPFAIL, f"the relay does not respond, and {reason}") from None


DROP_FORMAT = "zonerelay-drop-1"
"""The first line of a dropped file. MAIL and RCPT commands follow, then an empty line and the message."""
MAX_ENVELOPE = 1024 * 1024


def _pass_on(connection: socket.socket) -> int:
    """Run -bs: pass SMTP between standard input and output and the relay, one command at a time. A simple
    program writes all commands at once, with only LF as line ends.
    """
    source, target = sys.stdin.buffer, sys.stdout.buffer
    try:
        with connection, connection.makefile("rb") as replies:
            sent = b""
            while True:
                lines = _reply(replies)
                if sent[:4].upper() == b"EHLO":  # the bytes of TLS would not be lines
                    lines = [line for line in lines if line[4:].upper() != "STARTTLS"]
                    lines[-1] = f"{lines[-1][:3]} {lines[-1][4:]}"
                target.write("".join(f"{line}\r\n" for line in lines).encode())
                target.flush()
                code = lines[-1][:3]
                if code == "354":
                    if not _pass_message(source, connection):
                        raise SendmailError(
                            DATAERR,
                            "the message does not end with a line that contains only a dot; it was not sent",
                        )
                    sent = b""
                    continue
                if code in ("221", "421") or not (sent := _smtp_line(source)):
                    return OK
                connection.sendall(sent)
                if chunk := re.match(rb"(?i)BDAT +(\d{1,12})\b", sent):
                    left = int(chunk[1])
                    while left and (octets := source.read(min(left, 65536))):
                        connection.sendall(octets)
                        left -= len(octets)
    except OSError as error:
        reason = error.strerror or error
        raise SendmailError(TEMPFAIL, f"the connection to the relay was lost: {reason}") from None


def _pass_message(source: BinaryIO, connection: socket.socket) -> bool:
    """Pass the content of a message to the relay, and return whether its end was reached."""
    line, octets = b"", bytearray()
    while line != b".\r\n" and (line := _smtp_line(source)):
        octets += line
        if len(octets) > 65536:
            connection.sendall(octets)
            octets.clear()
    connection.sendall(octets)
    return line == b".\r\n"


def _smtp_line(source: BinaryIO) -> bytes:
    line = source.readline()
    return line.rstrip(b"\r\n") + b"\r\n" if line else b""


def listener_of(settings: dict[str, object]) -> str:
    """Return the address of the first listener that accepts mail from this machine in clear text and without
    a login.
    """
    listeners = settings.get("listener") or [{}]
    for each in listeners if isinstance(listeners, list) else []:
        if not isinstance(each, dict):
            continue
        closed = each.get("tls") == "implicit" or each.get("require_tls") or each.get("auth") == "required"
        if not closed and not each.get("proxy_networks"):
            return str(each.get("address", DEFAULT_LISTENER))
    raise SendmailError(CONFIG, "no [[listener]] of the relay accepts mail without TLS and a login")


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
        raise RelayDownError(TEMPFAIL, f"the relay at {address} does not respond: {reason}") from None
    except ValueError:
        raise SendmailError(CONFIG, f"the address of the [[listener]] is not valid: {address}") from None
    connection.settimeout(REPLY_TIMEOUT)
    return connection


def submit(
    address: str, sender: str, recipients: Sequence[str], message: bytes | None, wishes: Mapping[str, str]
) -> None:
    """Submit a message in one SMTP transaction; without a message, only check the recipients. Raise
    SendmailError if the message is not accepted.
    """
    with _connect(address) as connection, connection.makefile("rb") as replies:

        def ask(command: bytes, what: str, refused: int = UNAVAILABLE) -> str:
            try:
                connection.sendall(command)
                lines = _reply(replies)
            except OSError as error:
                reason = error.strerror or error
                raise SendmailError(TEMPFAIL, f"the connection to the relay was lost: {reason}") from None
            code, text = lines[-1][0], " / ".join(lines)
            if code not in "23":
                status = TEMPFAIL if code == "4" else NOPERM if " 5.7." in text else refused
                raise SendmailError(status, f"the relay rejected {what}: {text}")
            return text.upper()

        try:
            ask(b"", "the connection")
        except SendmailError as error:
            if error.status != TEMPFAIL:
                raise
            # the relay is stopping, or has no capacity now
            raise RelayDownError(TEMPFAIL, str(error)) from None
        offered = ask(b"EHLO localhost\r\n", "EHLO")
        eight_bit = "8BITMIME" in offered and not (message or b"").isascii()
        mail, *rcpts = _commands(sender, recipients, wishes, eight_bit=eight_bit)
        ask(f"{mail}\r\n".encode(), f"the sender {sender}", DATAERR)
        for each, rcpt in zip(recipients, rcpts, strict=True):
            ask(f"{rcpt}\r\n".encode(), f"the recipient {each}", NOUSER)
        if message is not None:
            ask(b"DATA\r\n", "the message")
            stuffed = re.sub(rb"(?m)^\.", b"..", message).replace(b"\n", b"\r\n")
            if not stuffed.endswith(b"\r\n"):
                stuffed += b"\r\n"  # after an incomplete line, the dot would not end the message
            ask(stuffed + b".\r\n", "the message", DATAERR)
        with contextlib.suppress(OSError):
            connection.sendall(b"QUIT\r\n")


def _commands(
    sender: str, recipients: Sequence[str], wishes: Mapping[str, str], *, eight_bit: bool
) -> list[str]:
    """Return the MAIL command and a RCPT command for each recipient, with the DSN parameters that are set
    (RFC 3461).
    """
    body = " BODY=8BITMIME" if eight_bit else ""
    utf8 = "" if "".join((sender, *recipients)).isascii() else " SMTPUTF8"
    given = {name: f" {name}={value}" for name, value in wishes.items() if value}
    notify = given.pop("NOTIFY", "")
    return [
        f"MAIL FROM:<{sender}>{body}{utf8}{''.join(given.values())}",
        *(f"RCPT TO:<{each}>{notify}" for each in recipients),
    ]


def _reply(replies: BinaryIO) -> list[str]:
    """Read a reply of the relay, and return its lines (RFC 5321, section 4.2). Raise OSError if it is not a
    valid reply.
    """
    lines = list[str]()
    while not lines or lines[-1][3:4] == "-":
        line = replies.readline(MAX_LINE).decode("utf-8", "replace").rstrip("\r\n")
        if not re.match(r"[2-5]\d\d(?: |-|$)", line):
            raise OSError(f"invalid reply {line!r}" if line else "connection closed by the relay")
        lines.append(line)
    return lines


def _show_queue() -> None:
    """Run `zonerelay queue list` in place of this process."""
    program = "/usr/bin/zonerelay"
    beside = os.path.join(sys.prefix, "bin", "zonerelay")
    if os.path.exists(beside):
        program = beside
    try:
        os.execv(program, [program, "queue", "list"])  # noqa: S606
    except OSError as error:
        raise SendmailError(OSERR, f"{program} cannot be run: {error.strerror}") from None
