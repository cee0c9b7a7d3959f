"""`python -m tests.bench.strangers`: the parsers that read what clients, receivers, name servers and
holders of tokens send, each with the processor time of its worst input among hostile patterns, as the table
of `docs/develop/parsers.md`.

Each is measured at the largest input that it is given, and at a quarter of that: `growth` is the ratio of
both. It is 4 for a parser in linear time, and 16 for one in quadratic time.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.targets import TARGETS
from zonerelay.admin.page.filter_text import FilterTextError
from zonerelay.admin.page.filter_text import parse as parse_filter
from zonerelay.admin.problems import ApiError
from zonerelay.admin.submission.body import JsonBody
from zonerelay.capture.parts import decoded, take_apart
from zonerelay.message.header import HeaderScanner, HeaderTooLargeError
from zonerelay.model.address_list import read_addresses
from zonerelay.model.charsets import CODECS, text_of
from zonerelay.routing.mta_sts import MAX_POLICY, parse_policy

KB, MB = 1024, 1024 * 1024

PATTERNS = (
    b"a", b" ", b"\t", b"\0", b"\xff", b"(", b"<", b'"', b"\\", b",", b";", b":", b"@", b".", b"[",
    b"{", b"%", b"&", b"=", b"+", b"-", b"\r\n", b"\r\n ", b"\n", b"a@b,", b"(a", b'"a" ', b"a;",
    b"a=b;", b"<a", b"a.", b"=?utf-8?q?a?= ", b"=?utf-8?b?YQ==?=", b"=?punycode?q?a-?=", b"&amp;",
    b"%41", b"\\u0041", b'\\"', b"\x1b$B", b"+AAA-", b"~{", b"a: b\r\n",
    b"Content-Type: multipart/mixed; boundary=b\r\n\r\n--b\r\n", b"--b\r\n\r\n", b"RCPT TO:<a@b>\r\n",
    b"250-SIZE 1\r\n", b"<style", b"<!--", b"href=", b"cid:", b'"":"",', b"[[", b"{{a}}",
)  # fmt: skip
"""What is repeated up to the size; whatever a parser treats in a way of its own."""


@dataclass(frozen=True, slots=True)
class Parser:
    """`who` sends its input, of `most` bytes, which `limit` bounds; `fronts` come before the pattern."""

    name: str
    who: str
    most: int
    limit: str
    run: Callable[[bytes], object]
    fronts: tuple[bytes, ...] = (b"",)


def _text(parse: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: parse(data.decode("utf-8", "replace"))


def _captured(data: bytes) -> None:
    parts = take_apart(data)
    _ = parts.words(), parts.links(), parts.html_to_show(), parts.date


def _charsets(data: bytes) -> None:
    for codec in CODECS:
        text_of(data, codec)


def _json(data: bytes) -> None:
    body = JsonBody(2 * MB, Path("/nonexistent"))
    with contextlib.suppress(ApiError):
        body.feed(data)


def _header(data: bytes) -> None:
    with contextlib.suppress(HeaderTooLargeError):
        HeaderScanner(256 * KB).feed(data)


def _filter(data: bytes) -> None:
    with contextlib.suppress(FilterTextError):
        parse_filter(data.decode("utf-8", "replace"))


def _policy(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        parse_policy(data)


CLIENT, RECEIVER, TOKEN = "clients", "receivers", "tokens"
MIME = (
    b"Content-Type: text/plain; charset=punycode\r\n\r\n", b"Content-Type: text/html\r\n\r\n",
    b"Content-Type: multipart/mixed; boundary=b\r\n\r\n", b'Content-Type: text/plain; a="',
    b"Content-Disposition: ",
    b"Subject: ", b"Date: ", b"Content-Transfer-Encoding: quoted-printable\r\n\r\n",
    b"Content-Type: multipart/mixed; boundary*=punycode''",
    b"Content-Transfer-Encoding: base64\r\n\r\n", b"Content-Transfer-Encoding: uuencode\r\n\r\nbegin 644 a\n",
)  # fmt: skip

PARSERS = (
    *(
        Parser(f"`{name}`, as fuzzed", who, most, limit, TARGETS[name])
        for name, who, most, limit in (
            ("lines", CLIENT, 64 * KB, "of a stream"),
            ("commands", CLIENT, 12 * KB, "the longest line"),
            ("paths", CLIENT, 12 * KB, "the longest line"),
            ("proxy", CLIENT, 4 * KB, "the PROXY header"),
            ("xclient", CLIENT, 4 * KB, "the longest line"),
            ("sasl", CLIENT, 12 * KB, "the longest line"),
            ("replies", RECEIVER, 64 * KB, "of a stream"),
            ("ehlo", RECEIVER, 16 * KB, "a reply"),
            ("dns", "name servers", 64 * KB, "a packet over TCP"),
        )
    ),
    Parser("header section", CLIENT, 256 * KB, "`max_header_size`", _header),
    Parser("address list", CLIENT, 256 * KB, "`max_header_size`", _text(read_addresses)),
    Parser("encoded words", CLIENT, 256 * KB, "`max_header_size`", decoded),
    Parser(
        "captured message", CLIENT, 256 * KB, "for each 256 KB of `max_message_size`", _captured, (b"", *MIME)
    ),
    Parser("all character sets", CLIENT, 64 * KB, "for each 64 KB of `max_message_size`", _charsets),
    Parser("JSON as it comes", TOKEN, MB, "for each MB", _json, (b"", b'{"a":"', b'{"a":')),
    Parser("filter of the page", TOKEN, KB, "1,000 characters", _filter),
    Parser("MTA-STS policy", "domains", MAX_POLICY, "of a policy", _policy),
)


def inputs(parser: Parser, size: int) -> Iterator[bytes]:
    for front in parser.fronts:
        for pattern in PATTERNS:
            yield (front + pattern * (size // len(pattern) + 1))[:size]


def seconds(parser: Parser, data: bytes) -> float:
    began = time.process_time()
    parser.run(data)
    return time.process_time() - began


def measured(parser: Parser) -> tuple[float, float]:
    """Return the processor time of the worst input, and its growth from a quarter of the size."""
    worst, data = max(
        ((seconds(parser, each), each) for each in inputs(parser, parser.most)), key=lambda each: each[0]
    )
    quarter = max(min(seconds(parser, data[: len(data) // 4]) for _ in range(3)), 1e-6)
    return worst, worst / quarter


def main() -> None:
    print("| parser | fed by | input | bounded by | CPU of the worst | growth |")
    print("|---|---|---|---|---|---|")
    for parser in PARSERS:
        worst, growth = measured(parser)
        size = f"{parser.most // KB} KB"
        cells = (parser.name, parser.who, size, parser.limit, f"{worst * 1000:.1f} ms", f"{growth:.1f}")
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
