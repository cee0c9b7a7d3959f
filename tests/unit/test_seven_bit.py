"""Messages in seven bits say what they said before, in ASCII and in lines that SMTP carries."""

import email
import email.policy
from email.message import EmailMessage

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zonerelay.message import conversion
from zonerelay.message.conversion import ascii_fields, folded
from zonerelay.smtp.server.line_ends import MAX_LINE

READ = email.policy.default.clone(refold_source="none")
EIGHT = email.policy.SMTPUTF8.clone(cte_type="8bit")


def surveyed(octets: bytes, cut: int = 7, *, seven_bit: bool = True) -> conversion.ConversionPlan:
    survey = conversion.ConversionSurvey(seven_bit=seven_bit)
    for at in range(0, len(octets), cut):
        survey.feed(octets[at : at + cut])
    survey.finish()
    return survey.plan


def converted(octets: bytes, cut: int = 7, *, seven_bit: bool = True) -> bytes:
    writer = conversion.Encoder(surveyed(octets, cut, seven_bit=seven_bit))
    pieces = [writer.feed(octets[at : at + cut]) for at in range(0, len(octets), cut)]
    return b"".join(pieces) + writer.finish()


def said(octets: bytes) -> list[object]:
    """What each part says, decoded."""
    message = email.message_from_bytes(octets, policy=READ)
    found: list[object] = []
    for part in message.walk():
        fields = [(name, " ".join(value.split())) for name, value in part.items()]
        kept = [each for each in fields if not each[0].lower().startswith(("content-t", "mime-"))]
        found.append((part.get_content_type(), part.get_filename(), kept))
        if not part.is_multipart():
            found.append(part.get_payload(decode=True))
    return found


def message(
    body: bytes,
    fields: str = "Content-Type: text/plain; charset=utf-8\r\nContent-Transfer-Encoding: 8bit\r\n",
) -> bytes:
    return b"From: Ann <ann@x.example>\r\nSubject: x\r\n" + fields.encode() + b"\r\n" + body


TEXT = "Grüße aus Köln\r\nein = und ein Ende \r\n.\r\n..x\r\nFrom here\r\n".encode()

BODIES = {
    "text": message(TEXT),
    "no end": message(TEXT + "ü".encode()),
    "a long line": message(b"x" * 5000 + b"\r\n"),
    "a longer line": message(b"=y " * 50_000 + "ü\r\n".encode()),
    "a NUL": message(b"a\0b\r\n"),
    "not UTF-8": message(b"caf\xe9\r\n", "Content-Type: text/plain; charset=iso-8859-1\r\n"),
    "no MIME fields": message(TEXT, ""),
    "no MIME fields, not UTF-8": message(b"caf\xe9\r\n", ""),
    "octets": message(
        bytes(range(256)).replace(b"\r", b"").replace(b"\n", b"") * 9 + b"\r\n", "Content-Type: image/png\r\n"
    ),
    "ASCII": message(b"plain\r\n"),
    "an empty body": message(b""),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("cut", [1, 7, 1000, 1_000_000])
def test_a_body_says_the_same(name: str, cut: int) -> None:
    before = BODIES[name]
    if cut == 1 and len(before) > 20_000:
        cut = 333
    after = converted(before, cut)
    assert after.isascii()
    assert max(map(len, after.split(b"\r\n"))) <= MAX_LINE
    assert after == converted(before, 1_000_000)
    assert said(after) == said(before)
    assert any(part.encoding for part in surveyed(before).parts) == (name not in ("ASCII", "an empty body"))


def test_what_needs_nothing_keeps_every_octet() -> None:
    octets = message(b"plain\r\n", "")
    assert converted(octets) == octets


def mixed() -> EmailMessage:
    inner = EmailMessage(policy=EIGHT)
    inner["Subject"] = "Über alles"
    inner["From"] = "Jörg <j@x.example>"
    inner.set_content("Ärger\n", cte="8bit")
    outer = EmailMessage(policy=EIGHT)
    outer["From"] = "Bücher GmbH <b@x.example>"
    outer["To"] = 'Ann <a@x.example>, "Müller, Jörg" <m@x.example>'
    outer["Subject"] = "Rechnung für Zoë =?utf-8?q?n=C3=A4?= ok"
    outer.set_content("Grüße\n", cte="8bit")
    outer.add_alternative("<p>Grüße " + "x" * 2000 + "</p>\n", subtype="html", cte="8bit")
    outer.add_attachment(b"\xff\x00" * 400, "image", "png", filename="größe.png", cte="base64")
    outer.add_attachment(inner)
    outer.add_attachment("plain\n", filename="a.txt")
    return outer


@pytest.mark.parametrize("cut", [1, 13, 100_000])
def test_parts_within_parts_say_the_same(cut: int) -> None:
    before = mixed().as_bytes()
    assert not before.isascii()
    after = converted(before, cut)
    assert after.isascii()
    assert max(map(len, after.split(b"\r\n"))) <= MAX_LINE
    assert said(after) == said(before)
    assert b"8bit" not in after


def test_octets_in_a_part_become_base64_and_its_delimiter_stays() -> None:
    octets = message(
        b"--b\r\nContent-Type: image/png\r\nContent-Transfer-Encoding: binary\r\n\r\n"
        b"\xff\xfe\r\n\r\n--b--\r\n",
        "Content-Type: multipart/mixed; boundary=b\r\n",
    )
    after = converted(octets)
    assert b"Content-Transfer-Encoding: base64\r\n\r\n//4NCg==\r\n--b--\r\n" in after
    assert said(after) == said(octets)


SIGNED = "Content-Type: multipart/signed; boundary=b\r\n"
REFUSED = {
    "a signature covers it": message(b"--b\r\n\r\n\xc3\xbc\r\n--b--\r\n", SIGNED),
    "a signature covers its long line": message(b"--b\r\n\r\n" + b"x" * 999 + b"\r\n--b--\r\n", SIGNED),
    "encoded and not ASCII": message(b"\xc3\xbc\r\n", "Content-Transfer-Encoding: quoted-printable\r\n"),
    "outside the parts": message(
        b"\xc3\xbc\r\n--b\r\n\r\n--b--\r\n", "Content-Type: multipart/mixed; boundary=b\r\n"
    ),
    "an address": "From: Jörg <jörg@x.example>\r\n\r\n".encode(),
    "an address in a domain": "To: j@bücher.example\r\n\r\n".encode(),
    "an identifier": "Message-ID: <ü@x.example>\r\n\r\n".encode(),
    "a group": "To: Bücher: a@x.example;\r\n\r\n".encode(),
    "a boundary in sections and whole": message(
        b"\xff\r\n", "Content-Type: multipart/mixed; boundary*=us-ascii''a; boundary*0=b\r\n"
    ),
    "parameters that take half an hour": message(
        b"\xff\r\n", f'Content-Type: multipart/mixed; a="{";" * 1_000_000}\r\n'
    ),
    "addresses that take a second": f"To: {'ü<a@x.example>,' * 4096}\r\n\r\n".encode(),
    "a header without an end": b"X: " + b"x" * 1_100_000,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_form_without_loss_is_refused(name: str) -> None:
    with pytest.raises(conversion.NotConvertibleError):
        converted(REFUSED[name], 5000)


FIELDS = [
    ("Subject: Grüße", "Grüße"),
    ("Subject: Rechnung für Zoë Ängström", "Rechnung für Zoë Ängström"),
    ("Subject: a ü b ö", "a ü b ö"),
    ("Subject: =?utf-8?q?n=C3=A4?= ü =?utf-8?q?n?=", "nä ü n"),
    ("Subject:\r\n Grüße\r\n zwei", "Grüße zwei"),
    ("Subject: " + "ü" * 500, "ü" * 500),
    ("X-Note: é", "é"),
    ("From: Jörg <j@x.example>", "Jörg <j@x.example>"),
    ("From: \"Müller, Jörg\" <j@x.example>", '"Müller, Jörg" <j@x.example>'),
    ("To: Ann <a@x.example>, Jörg <j@x.example>", "Ann <a@x.example>, Jörg <j@x.example>"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), FIELDS)
def test_a_field_says_the_same(field: str, value: str) -> None:
    block = ascii_fields(f"{field}\r\n".encode())
    assert block.isascii()
    assert max(map(len, block.split(b"\r\n"))) <= 78
    name = field.partition(":")[0]
    assert email.message_from_bytes(block + b"\r\n", policy=READ)[name] == value


def test_a_name_of_a_file_is_a_parameter_in_octets() -> None:
    block = ascii_fields('Content-Disposition: attachment; filename="größe.txt"; size=3\r\n'.encode())
    part = email.message_from_bytes(block + b"\r\n", policy=READ)
    assert part.get_filename() == "größe.txt"
    assert part["Content-Disposition"].params["size"] == "3"


def test_text_in_an_unknown_charset_keeps_its_octets() -> None:
    assert ascii_fields(b"Subject: caf\xe9\r\n") == b"Subject: =?unknown-8bit?b?Y2Fm6Q==?=\r\n"


LONG_FIELDS = [
    b"References: " + b" ".join(b"<%d@x.example>" % number for number in range(200)),
    b"References: " + b"".join(b"<%d@x.example>" % number for number in range(200)),
    b"Subject: " + "ü ".encode() * 2000 + b"x",
    b"X-List:" + b"\tword" * 500,
]


@pytest.mark.parametrize("field", LONG_FIELDS)
def test_a_long_field_is_folded_and_says_the_same(field: bytes) -> None:
    block = b"A: b\r\n" + field + b"\r\nC: d\r\n"
    after = folded(block)
    assert max(map(len, after.split(b"\r\n"))) <= MAX_LINE
    unfolded = after.replace(b"\r\n ", b" ").replace(b"\r\n\t", b"\t")
    assert unfolded.replace(b"> <", b"><") == block.replace(b"> <", b"><")
    assert folded(after) == after


def test_a_word_that_is_too_long_stays() -> None:
    block = b"X: " + b"x" * 2000 + b" y\r\n"
    assert folded(block) == b"X:\r\n " + b"x" * 2000 + b" y\r\n"


def test_only_what_is_too_long_is_encoded_where_eight_bits_are_taken() -> None:
    short = "Content-Type: text/plain; charset=utf-8\r\nContent-Transfer-Encoding: 8bit\r\n\r\nGrüße\r\n"
    long = "Content-Type: text/html; charset=utf-8\r\n\r\n" + "Grüße " * 400 + "\r\n"
    octets = message(
        f"--b\r\n{short}--b\r\n{long}--b--\r\n".encode(), "Content-Type: multipart/mixed; boundary=b\r\n"
    )
    after = converted(octets, seven_bit=False)
    assert short.encode() in after
    assert max(map(len, after.split(b"\r\n"))) <= MAX_LINE
    assert said(after) == said(octets)
    plain = message(TEXT)
    assert not surveyed(plain, seven_bit=False).needed


@settings(max_examples=80, deadline=None)
@given(
    lines=st.lists(
        st.binary(max_size=1200).map(lambda b: b.replace(b"\r", b"").replace(b"\n", b"")), max_size=5
    ),
    kind=st.sampled_from(["text/plain", "text/html; charset=utf-8", "application/octet-stream", ""]),
    cut=st.integers(1, 3000),
)
def test_any_body_comes_back(lines: list[bytes], kind: str, cut: int) -> None:
    before = message(b"".join(line + b"\r\n" for line in lines), f"Content-Type: {kind}\r\n" if kind else "")
    after = converted(before, cut)
    assert after.isascii()
    assert max(map(len, after.split(b"\r\n"))) <= MAX_LINE
    payloads = [email.message_from_bytes(each).get_payload(decode=True) for each in (before, after)]
    assert payloads[0] == payloads[1]


@pytest.mark.parametrize("cut", [7, 1000, 100_000])
@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("base64", b"QUJD" * 1500 + b"\r\n"),
        ("base64", b"QUJD" * 20_000 + b"QQ=="),
        ("quoted-printable", b"=41b c" * 1500 + b"\r\nend\r\n"),
        ("quoted-printable", b"=41bc" * 8_000 + b"=\r\nend=\r\n"),
        ("quoted-printable", b"x" * 2000 + b"=3D=\r\n" + b"y" * 75 * 20 + b"=\r\nend = x\r\n"),
    ],
)
def test_long_lines_of_an_encoded_part_are_made_shorter(encoding: str, body: bytes, cut: int) -> None:
    """Applications send base64 as one line. Receivers refuse it as any other (Exim: 998)."""
    fields = f"Content-Type: application/pdf\r\nContent-Transfer-Encoding: {encoding}\r\n"
    parts = "--b\r\n" + fields + "\r\n" + body.decode() + "\r\n--b--\r\n"
    before = message(parts.encode(), "Content-Type: multipart/mixed; boundary=b\r\n")
    for seven_bit in (False, True):
        after = converted(before, cut, seven_bit=seven_bit)
        assert max(map(len, after.split(b"\r\n"))) <= 76
        assert said(after) == said(before)
        assert not surveyed(after, seven_bit=False).needed


@settings(max_examples=80, deadline=None)
@given(
    words=st.lists(
        st.sampled_from(["=41", "=", "a", " ", "\t", "=3D", "x" * 990, "=E4=F6" * 200]), max_size=40
    ),
    cut=st.integers(1, 3000),
)
@example(["=41", "x" * 990, "x" * 990, "x" * 990, "=", "=41"], 1)
def test_any_quoted_printable_text_comes_back(words: list[str], cut: int) -> None:
    fields = "Content-Type: text/plain\r\nContent-Transfer-Encoding: quoted-printable\r\n"
    before = message(("x" * 999 + "".join(words) + "|\r\nend\r\n").encode(), fields)
    after = converted(before, cut, seven_bit=False)
    assert max(map(len, after.split(b"\r\n"))) <= 76
    assert said(after) == said(before)


@pytest.mark.parametrize(
    ("encoding", "body", "seven_bit"),
    [
        ("x-uuencode", b"x" * 2000, False),
        ("base64", "QUJDü".encode(), True),
        ("base64", b"QUJD\0", True),
        ("quoted-printable", b"=41\0", True),
    ],
)
def test_a_part_that_its_encoding_forbids_stays_as_it_is(encoding: str, body: bytes, seven_bit: bool) -> None:
    fields = f"Content-Type: application/pdf\r\nContent-Transfer-Encoding: {encoding}\r\n"
    with pytest.raises(conversion.NotConvertibleError):
        surveyed(message(body + b"\r\n", fields), seven_bit=seven_bit)
