r"""Parses address lists as users and programs write them (RFC 5322 3.4 and 4.4, RFC 6532). No I/O.

Mailboxes and groups are read, names with whatever is in them, comments within comments, quoted strings,
domain literals, routes, encoded words, UTF-8 and folds; both "," and ";" separate. An address may lack its
domain, as `root` does: the caller decides about that. What cannot be read affects its own element only:

- an entry without an address has the text of the element, so that the caller can name it;
- a quote, comment or bracket that has no end is a character like any other;
- an encoded word is one word, although some programs leave commas and the like in it;
- in text that is not UTF-8 (decoded with "replace" or "surrogateescape") the second byte of a character may
  be one of @ [ \ ] (GBK, Big5, Shift JIS), and in ISO-2022-JP any.

The time is linear in the length of the text, and there is no recursion. This module alone reads addresses in
header fields, because the results of `email.utils.getaddresses` differ between releases of Python. It imports
almost nothing, because sendmail(1) is started for each message, and it can be imported alone, for tests on
other Pythons.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

MAX_ADDRESS = 320
"""Characters (RFC 5321 4.5.3.1: 64, "@" and 255). No address is longer."""


class AddressEntry(NamedTuple):
    """An element of an address list: an address, or text that is not an address. `address` is `local@domain`,
    `local`, or "" when it cannot be read; `name` is the display name, undecoded; `text` is the element as it
    is written; `end` is where the address ends.
    """

    name: str
    address: str
    text: str
    end: int


class AddressList(NamedTuple):
    """The parsed elements of an address list. `clear` means that no other software can find different
    addresses in it, because every quote, comment and bracket has its end, and no encoded word contains a
    separator of addresses.
    """

    entries: tuple[AddressEntry, ...]
    clear: bool


Span = tuple[int, int]

_ATOM = r'[^\x00-\x20\x7f()<>\[\]:;@\\,."]'
_ENCODED = r"=\?[^\s?]++\?[bBqQ]\?[^\s?]*+\?="
_ISO_2022 = r"\x1b\$[@B][^\x1b]*+\x1b\([BJ]"
_FOREIGN = r"[\udc80-\udcff\ufffd]"
_ODD = r"\\\x1b\udc80-\udcff\ufffd"  # in a class
_PART = rf"(?:{_ENCODED}|{_ISO_2022}|(?:{_ATOM}|(?<={_FOREIGN})[@\[\\\]])+)"
# A blank, or a comment without others in it; a word, dots included where they are between its parts; a quoted
# string; a literal; what stands for itself; anything else.
_TOKEN = re.compile(
    rf"([ \t\r\n]++|\([^(){_ODD}]*+\))|({_PART}(?:\.{_PART})*)"
    rf'|("[^"{_ODD}]*+")|(\[[^\[\]\\<>@]*+\])|([<>:;@,.])|(.)',
    re.DOTALL,
)
_BLANK, _WORD, _QUOTED, _LITERAL, _SPECIAL, _OTHER = range(1, 7)
_LETTERS = {_WORD: "w", _QUOTED: "q", _LITERAL: "l"}
JUNK = "x"
_IN_COMMENT = re.compile(rf"[^(){_ODD}]++|{_FOREIGN}\\?|{_ISO_2022}|\\.|[()]", re.DOTALL)
_IN_QUOTED = re.compile(rf'[^"{_ODD}]++|{_FOREIGN}\\?|{_ISO_2022}|\\.|"', re.DOTALL)
_PAIR = re.compile(r"\\(.)", re.DOTALL)
_SEPARATES = re.compile(r'[,;<>()"]')

LOCAL = r"\.*+[wq](?:\.++[wq])*+\.*+"
"""Dots anywhere, as `smtp/server/paths.py` reads them."""
SPEC = rf"{LOCAL}@(?:w(?:\.w)*+|l)"
ROUTE = "(?:@[wl.,@]*+:)?"
# Patterns over one letter for each token. In this order: what separates elements, the name of a group, an
# address in angle brackets, addresses without, an element that cannot be read. An address without a domain is
# a whole element: a word of a name never becomes one.
_ELEMENT = re.compile(
    rf"([,;]+)|(?<!>)([^<>,;:@]*+:)|[^<>,;:]*+<{ROUTE}({SPEC}|{LOCAL})>"
    rf"|(?:((?:{SPEC})+)|(?<!>)({LOCAL}))(?=[,;]|\Z)|[^,;]++"
)
_SEPARATOR, _GROUP, _IN_ANGLE, _SPECS, _LOCAL = range(1, 6)
_BARE = re.compile(rf"{SPEC}|{LOCAL}")


def read_addresses(text: str) -> AddressList:
    """Parse the address list in a header field or in an argument of the same form."""
    letters, spans = tokenize(text)
    found: list[AddressEntry] = []
    for element in _ELEMENT.finditer(letters):
        kind = element.lastindex
        if kind in (_SEPARATOR, _GROUP):
            continue
        first, behind = element.span()
        begin = spans[first - 1][1] if first else 0
        end = spans[behind][0] if behind < len(spans) else len(text)
        written = text[begin:end].strip(" \t\r\n")
        if kind == _IN_ANGLE:
            at = letters.index("<", first)
            name = _name(text, begin, letters[first:at], spans[first : at + 1])
            found.append(AddressEntry(name, *_joined(text, spans, element.span(_IN_ANGLE), written)))
        elif kind in (_SPECS, _LOCAL):
            each = [match.span() for match in _BARE.finditer(letters, first, behind)]
            if len(each) == 1:
                name = _comment(text, begin, spans[first:behind], end)
                found.append(AddressEntry(name, *_joined(text, spans, (first, behind), written)))
            else:
                found += [AddressEntry("", *_joined(text, spans, one, written)) for one in each]
        else:
            found.append(AddressEntry("", "", written, end))
    odd = any(text.startswith("=?", begin) and _SEPARATES.search(text, begin, end) for begin, end in spans)
    return AddressList(tuple(found), JUNK not in letters and not odd)


def recipient_fields(names: Sequence[str]) -> list[int]:
    """Return the names of the recipient fields: To, Cc and Bcc (RFC 5322 3.6.3), or the newest Resent- fields
    if there are any (3.6.6). Those are the first; they end where one comes a second time, or at a Received
    field.
    """
    resent: dict[str, int] = {}
    for at, name in enumerate(names):
        if resent and (name in resent or name == "received"):
            break
        if name.startswith("resent-"):
            resent[name] = at
    if resent:
        return [at for name, at in resent.items() if name in ("resent-to", "resent-cc", "resent-bcc")]
    return [at for at, name in enumerate(names) if name in ("to", "cc", "bcc")]


def tokenize(text: str) -> tuple[str, list[Span]]:
    """Split an address list into tokens without white space and comments, and return their kinds and
    positions. The kinds are letters: w for a word, q for a quoted string, l for a literal, x for an invalid
    character, and special characters themselves.
    """
    letters: list[str] = []
    spans: list[Span] = []
    comments: dict[int, int] | None = None
    quotes_end = True
    position = 0
    while match := _TOKEN.match(text, position):
        kind, begin, position = match.lastindex, position, match.end()
        if kind == _BLANK:
            continue
        letter = _LETTERS.get(kind or 0) or (text[begin] if kind == _SPECIAL else JUNK)
        if kind == _OTHER and text[begin] == "(":
            if comments is None:
                comments = _comments(text, begin)
            if begin in comments:
                position = comments[begin]
                continue
        elif kind == _OTHER and text[begin] == '"' and quotes_end:
            end = _behind_quoted(text, position)
            if end:
                letter, position = "q", end
            else:
                quotes_end = False
        letters.append(letter)
        spans.append((begin, position))
    return "".join(letters), spans


def _comments(text: str, position: int) -> dict[int, int]:
    """Return the end of each comment that may begin at or after `position`, by its start. Comments may be
    nested to any depth.
    """
    ends: dict[int, int] = {}
    opened: list[int] = []
    for match in _IN_COMMENT.finditer(text, position):
        if match[0] == "(":
            opened.append(match.start())
        elif match[0] == ")" and opened:
            ends[opened.pop()] = match.end()
    return ends


def _behind_quoted(text: str, position: int) -> int:
    """Return the position after the quoted string whose content begins here, or 0 if it is not closed."""
    for match in _IN_QUOTED.finditer(text, position):
        if match[0] == '"':
            return match.end()
    return 0


def _joined(text: str, spans: list[Span], tokens: Span, written: str) -> tuple[str, str, int]:
    """Return the address that these tokens form, the entry's text, and the position after the last token."""
    first, behind = tokens
    address = "".join([text[begin:end] for begin, end in spans[first:behind]]).replace("\r\n", "")
    can_be = "\ufffd" not in address and address.isprintable() and len(address) <= MAX_ADDRESS
    return address if can_be else "", written, spans[behind - 1][1]


def _name(text: str, begin: int, letters: str, spans: list[Span]) -> str:
    """Return the display name, with comments, that precedes the last of these tokens."""
    pieces: list[str] = []
    for letter, (first, end) in zip(letters, spans, strict=False):
        if letter == "q":
            pieces += (text[begin:first], _PAIR.sub(r"\1", text[first + 1 : end - 1]))
            begin = end
    pieces.append(text[begin : spans[-1][0]])
    return " ".join("".join(pieces).split())


def _comment(text: str, begin: int, spans: list[Span], end: int) -> str:
    """Return the comments around and between these tokens, where older programs write the display name."""
    gaps: list[str] = []
    for first, behind in spans:
        gaps.append(text[begin:first])
        begin = behind
    gaps.append(text[begin:end])
    name = " ".join("".join(gaps).split())
    return name[1:-1].strip() if name else ""
