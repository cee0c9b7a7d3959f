"""Whose mail it is, by its From field."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zonerelay.message.dkim.signature import author_domain

VALUES = [
    ("an address alone", "ann@example.com", "example.com"),
    ("a name and an address", "Ann <ann@example.com>", "example.com"),
    ("no space between", "Ann<ann@example.com>", "example.com"),
    ("as it is written", "<ann@Example.COM>", "Example.COM"),
    ("a U-label", "Änn <änn@bücher.example>", "bücher.example"),
    ("the first of several", "ann@example.com, bob@example.net", "example.com"),
    ("an address in a quoted name", '"eve@evil.example, x" <ann@example.com>', "example.com"),
    ("a quote in a quoted name", r'"a \" <eve@evil.example> " <ann@example.com>', "example.com"),
    ("an address in a comment", "(eve@evil.example) ann@example.com", "example.com"),
    ("comments within comments", "(a (b) eve@evil.example) <ann@example.com> (c)", "example.com"),
    ("an address as a name", "eve@evil.example <ann@example.com>", "example.com"),
    ("a comma in a name that is not quoted", "Smith, Ann <ann@example.com>", "example.com"),
    ("a quoted local part", '"ann@home"@example.com', "example.com"),
    ("a group", "Staff: ann@example.com, bob@example.net;", "example.com"),
    ("a group with names", "Staff: Ann <ann@example.com>;", "example.com"),
    ("an obsolete route", "<@a.example,@b.example:ann@example.com>", "example.com"),
    ("blanks in the address", "ann @ example . com", "example.com"),
    ("an encoded name", "=?utf-8?q?=40?= <ann@example.com>", "example.com"),
    ("an empty group", "undisclosed:;", ""),
    ("nothing", "", ""),
    ("a name alone", "ann", ""),
    ("the null address", "<>", ""),
    ("an address literal", "ann@[192.0.2.1]", ""),
    ("a quote without an end", '"Ann <ann@example.com>', "example.com"),
    ("a comment without an end", "(Ann <ann@example.com>", "example.com"),
    ("dots that an address may not have", "Ann <ann..b.@example.com> (home)", "example.com"),
]


@pytest.mark.parametrize(("why", "value", "domain"), VALUES, ids=[case[0] for case in VALUES])
def test_the_domain_of_the_first_address(why: str, value: str, domain: str) -> None:
    header = f"To: x@y.example\r\nFrom: {value}\r\nSubject: z\r\n".encode()
    assert author_domain(header) == domain


HEADERS = [
    ("folded", b"From: Ann\r\n\t<ann@example.com>\r\n", "example.com"),
    ("on the next line", b"From:\r\n ann@example.com\r\n", "example.com"),
    ("in other letters", b"X: y\r\nfRoM :ann@example.com\r\n", "example.com"),
    ("without a line end", b"From: ann@example.com", "example.com"),
    ("two fields", b"From: ann@example.com\r\nFrom: ann@example.com\r\n", ""),
    ("none", b"Subject: From: ann@example.com\r\n", ""),
    ("in a continuation", b"Subject: x\r\n From: ann@example.com\r\n", ""),
    ("octets that are no UTF-8", b"From: \xff <ann@example.com>\r\n", "example.com"),
    ("before the @", b"From: j\xfcrgen@example.com\r\n", "example.com"),
    ("in the domain", b"From: ann@b\xfccher.example\r\n", ""),
    ("too long", b"From: " + b"x" * 70_000 + b" <ann@example.com>\r\n", ""),
    ("no header", b"", ""),
]


@pytest.mark.parametrize(("why", "header", "domain"), HEADERS, ids=[case[0] for case in HEADERS])
def test_the_field_is_found_as_signing_finds_it(why: str, header: bytes, domain: str) -> None:
    assert author_domain(header) == domain


ENCODINGS = [
    ("latin-1", "Jürgen Müß, Straße"),
    ("cp1251", "Иван Петров"),
    ("koi8-r", "Иван Петров"),
    ("gbk", "丂丂 中文乗亅乣"),
    ("gb18030", "㐀 中文"),
    ("big5", "功能 許蓋"),
    ("shift-jis", "表示 ソース 構能"),
    ("euc-jp", "日本語"),
    ("euc-kr", "한국어"),
    ("iso-2022-jp", "日本語 表示 ソース 三日"),
    ("utf-8", "日本語"),
]


@pytest.mark.parametrize(("encoding", "name"), ENCODINGS, ids=[case[0] for case in ENCODINGS])
@pytest.mark.parametrize("value", ["{} <ann@example.com>", '"{}" <ann@example.com>', "ann@example.com ({})"])
def test_a_name_in_any_encoding(encoding: str, name: str, value: str) -> None:
    for shown in (name, *name):
        written = shown if value[0] == '"' else shown.replace(",", "")
        header = f"From: {value.format(written)}\r\n".encode(encoding)
        assert author_domain(header) == "example.com", header


@given(st.text(alphabet='a@.<>,;:"\\() [é', max_size=30))
def test_whatever_it_says_there_is_an_answer(value: str) -> None:
    domain = author_domain(f"From: {value}\r\n".encode())
    assert not set(domain) & set('@<>,;:"() ')


LONG = ["(" * 60_000, '"' * 60_001, "a," * 30_000, "<" * 60_000, "@" * 60_000, "\\" * 60_000, ": " * 30_000]


@pytest.mark.parametrize("value", LONG, ids=[value[:2] for value in LONG])
def test_a_long_field_takes_time_in_proportion(value: str) -> None:
    began = time.process_time()
    author_domain(f"From: {value}\r\n".encode())
    assert time.process_time() - began < 0.5
