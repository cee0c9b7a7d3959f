"""Command lines, and what MAIL and RCPT say.

Invariants: only `CommandError` is raised, and its reply fits the wire; the same lines come out of any cut;
a line has no line end in it and keeps its limit; a mailbox that was let in is let in again in
its path form, unchanged, has no control character, no bracket or blank outside quotes, and fits the
limits of RFC 5321 4.5.3.1.
"""

import re
from datetime import UTC, datetime

from tests.support.feeding import cuttings
from zonerelay.model.envelope import domain_of, path
from zonerelay.model.reply import Reply
from zonerelay.smtp.server import params
from zonerelay.smtp.server.commands import LIMITS, MAX_LINE, LineFault, LineReader, parse_command
from zonerelay.smtp.server.paths import MAX_DOMAIN, MAX_PATH, CommandError, forward_path, reverse_path

DAY = 86400.0
BEGINNING_OF_TIME = datetime.min.replace(tzinfo=UTC).timestamp() - DAY
END_OF_TIME = datetime.max.replace(tzinfo=UTC).timestamp() + DAY
LIMIT = 64  # short, so that overlong lines are found soon
OFFERED_TO_MAIL = (
    params.MAIL_PARAMETERS
    | params.DSN_MAIL_PARAMETERS
    | params.AUTH_MAIL_PARAMETERS
    | params.HOLD_MAIL_PARAMETERS
)
OFFERED_TO_RCPT = params.RCPT_PARAMETERS | params.DSN_RCPT_PARAMETERS

_REFUSAL = re.compile(rb"[45]\d\d [245]\.\d{1,3}\.\d{1,3} [ -~]{1,400}\r\n")
_QUOTED = re.compile(r'^"(?:[^"\\]|\\.)*"')


def lines(data: bytes) -> None:
    found = [_lines(pieces) for pieces in cuttings(data)]
    assert all(each == found[0] for each in found[1:])
    for line in found[0]:
        if isinstance(line, bytes):
            assert b"\n" not in line
            assert len(line) <= LIMIT - 2
    assert len(found[0]) == data.count(b"\n")
    assert found[0].count(LineFault.BARE_LF) == data.count(b"\n") - data.count(b"\r\n")


def _lines(pieces: list[bytes]) -> list[bytes | LineFault]:
    reader, found = LineReader(LIMIT), []
    for piece in pieces:
        only = reader.only_line(piece)
        reader.feed(piece)
        taken = []
        while (line := reader.next()) is not None:
            taken.append(line)
        assert only is None or taken == [only]
        assert reader.waiting <= LIMIT
        found += taken
    return found


def commands(data: bytes) -> None:
    for line in data.split(b"\n")[:50]:
        command(line.removesuffix(b"\r")[:MAX_LINE])


def command(line: bytes) -> None:
    try:
        verb, argument = parse_command(line)
        assert (verb + argument).isprintable()
        assert verb == verb.upper()
        assert argument == argument.strip(" ")
        if verb == "MAIL":
            _mail(argument)
        elif verb == "RCPT":
            assert len(line) <= LIMITS["RCPT"]
            _rcpt(argument)
    except CommandError as error:
        refusal(error.reply)


def paths(data: bytes) -> None:
    """The same, without a command around it, so that the fuzzer gets further."""
    text = data.decode("utf-8", "replace")
    if not text.isprintable():
        return  # `parse_command` lets none of these through
    for parse in (_mail, _rcpt):
        for argument in (text, f"FROM:{text}", f"TO:{text}"):
            try:
                parse(argument)
            except CommandError as error:
                refusal(error.reply)


def refusal(reply: Reply) -> None:
    """A reply of one line that says what is wrong and repeats nothing that could move a cursor."""
    assert _REFUSAL.fullmatch(reply.encode()), reply


def _mail(argument: str) -> None:
    mail = params.parse_mail(argument, offered=OFFERED_TO_MAIL)
    assert mail.smtputf8 or mail.sender.isascii()
    assert mail.size >= 0
    assert mail.envid.isascii()
    assert mail.envid.isprintable()
    assert mail.hold_for is None or 0 < mail.hold_for <= params.MAX_HOLD_FOR
    assert mail.hold_until is None or BEGINNING_OF_TIME <= mail.hold_until < END_OF_TIME
    assert mail.hold_for is None or mail.hold_until is None
    if mail.sender:
        _check_mailbox(mail.sender)
    assert reverse_path(path(mail.sender)) == (mail.sender, "")


def _rcpt(argument: str) -> None:
    for smtputf8 in (False, True):
        rcpt = params.parse_rcpt(argument, smtputf8=smtputf8, offered=OFFERED_TO_RCPT)
        assert smtputf8 or rcpt.address.isascii()
        assert rcpt.orcpt.isprintable()
        assert " " not in rcpt.orcpt
        if rcpt.address.lower() != "postmaster":
            _check_mailbox(rcpt.address)
        assert forward_path(path(rcpt.address)) == (rcpt.address, "")


def _check_mailbox(mailbox: str) -> None:
    local, at, domain = mailbox.rpartition("@")
    assert at
    assert local
    assert domain
    assert mailbox.isprintable()
    assert not set(_QUOTED.sub("", mailbox)) & set(' <>",;:\\()') - (set(":") if domain[0] == "[" else set())
    assert not set(_QUOTED.sub("", local)) & set("@")
    assert len(domain.encode()) <= MAX_DOMAIN
    assert len(path(mailbox).encode()) <= MAX_PATH  # type: ignore[arg-type]  # it is one, or we are not here
    assert not domain_of(mailbox).endswith(".")  # type: ignore[arg-type]
