"""Who writes as whom: a user who is bound to senders may not use another From field, however it is hidden."""

from __future__ import annotations

import pytest

from tests.support.feeding import cuts
from zonerelay.config.credentials.file import User
from zonerelay.config.settings import KB, ListenerSettings
from zonerelay.inbound.access.networks import Client
from zonerelay.inbound.state.client_state import ClientState, grant_table
from zonerelay.message.header.headers import MAX_METADATA, HeaderScanner, authors

MAX_HEADER = 256 * KB


def may_write(header: bytes, *, whole: bool = True) -> bool:
    settings = ListenerSettings()
    standing = ClientState(settings, grant_table(settings), Client("", 0, may_relay=True), None)
    standing.logged_in(User("app", "", ("me@example.org",)))
    message = header + b"\r\n\r\nFrom: somebody@example.com\r\n"
    for pieces in [[message]] if whole else cuts(message):
        scanner = HeaderScanner(MAX_HEADER)
        for piece in pieces:
            if scanner.header is None:
                scanner.feed(piece)
        found = scanner.finish()
        allowed = standing.may_write_as(authors(found, bytes(scanner.held)))
        if not allowed:
            return False
    return True


MINE = [
    (b"From: me@example.org", "plain"),
    (b"FROM : Me <me@example.org>", "in capitals, a blank before the colon"),
    (b"From:\r\n\tme@example.org", "folded"),
    (b"From: me@example.org (boss@example.org)", "a comment is no address"),
    (b'From: "boss@example.org" <me@example.org>', "nor is a name"),
    (b"From: me@example.org <me@example.org>", "an address for a name, as WordPress writes"),
    (b"From: boss@example.org <me@example.org>", "whatever the name is"),
    (b"From: A (Foo, Inc) <me@example.org>", "a comma in a comment"),
    (b"From: Shop [Sales] <me@example.org>", "brackets in a name"),
    (b"From: J\xfcrgen <me@example.org>", "a name in Latin-1"),
    (b'From: "\x95\x5c" <me@example.org>', "a name in Shift JIS, whose last octet is a backslash"),
    (b"From: \x81\x40 <me@example.org>", "a name in GBK with an octet like @"),
    (b'From: "Me <me@example.org>', "a quote without an end"),
    (b'From: \x1b$B$"\x1b(B <me@example.org>', "a name in ISO-2022-JP"),
    (b"From: =?utf-8?q?Foo,_Inc?= <me@example.org>", "a comma in an encoded word"),
    (b"Subject: x\r\n from: boss@example.org", "a continuation is no field"),
    (b"Subject: x", "no author at all"),
    (b"From me@example.org Mon Jan  1\r\nFrom: me@example.org", "behind an mbox line"),
    (b"no header\r\nFrom: boss@example.org", "a body: we put an empty line before it"),
    (b"Subject: x\r\nstray\r\nFrom: boss@example.org", "behind a stray line: likewise"),
    (b"From x Mon Jan  1\r\nstray\r\nFrom: boss@example.org", "behind an mbox line and a stray one"),
]
OTHERS = [
    (b"From: boss@example.org", "plain"),
    (b"From: me@example.org, boss@example.org", "the second of two"),
    (b"From: me@example.org\r\nFrom: boss@example.org", "in a second field"),
    (b"From\t: boss@example.org", "a tab before the colon"),
    (b"From: all: boss@example.org;", "in a group"),
    (b"From: b\xf6ss@example.org", "not ASCII"),
    (b"From: b\xf6@example.com <me@example.org>, \xf6@example.com", "before the @"),
    (b"From: =?utf-8?q?,boss@example.org,?= <me@example.org>", "for those who split an encoded word"),
    (b'From: "a\\" <boss@example.org>, "b" <me@example.org>', "for those who know no quoted pairs"),
    (b'From: me@example.org, "boss <boss@example.org>', "behind a quote without an end"),
    (b"From: <me@example.org> <boss@example.org>", "without a comma"),
    (b"From: boss@example.org <me@example.org", "before a bracket without an end"),
    (b"From: me@example.org, boss", "without a domain"),
    (b"From: boss:;", "an empty group"),
    (b"From:", "nobody"),
    (b"Subject: x\x0bFrom: boss@example.org", "behind a vertical tab, for those to whom it ends a line"),
    (b"Subject: x\xe2\x80\xa8From: boss@example.org", "behind a line separator of Unicode"),
    (b"From: me@example.org\x01.evil.example", "for those who drop controls"),
    (b"Subject: x\r\nFrom\r\n : boss@example.org", "a fold before the colon"),
    (b"X: " + b"x" * MAX_METADATA + b"\r\nFrom: boss@example.org", "behind more than is kept for people"),
    (b"From: " + b"(" * 2000 + b"me@example.org", "more comments than anybody could read"),
    (b"From: " + b"me@example.org, " * 1000 + b"me@example.org", "more authors than anybody has"),
]


@pytest.mark.parametrize(("header", "why"), MINE, ids=[row[1] for row in MINE])
def test_a_user_writes_as_itself(header: bytes, why: str) -> None:
    assert may_write(header, whole=False), why


@pytest.mark.parametrize(("header", "why"), OTHERS, ids=[row[1] for row in OTHERS])
def test_a_user_does_not_write_as_somebody_else(header: bytes, why: str) -> None:
    assert not may_write(header), why
