"""Wishes about reports (RFC 3461) handed by a client to us and by us to a real Postfix, with DSN and without.

Behind Postfix is a sink, for mail and for whatever anybody reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.postfix import PostfixInstance, PostfixSettings, PostfixTools
from tests.support.process import RelayProcess
from tests.support.relay import LOOPBACK
from tests.support.sink import Sink
from tests.support.wishes import TEXT, Report

ORCPT = "ORCPT=rfc822;Bee+2Bnews@old.example"


@contextmanager
def chain(directory: Path, sink: Sink, tools: PostfixTools, *, dsn: bool = True) -> Iterator[RelayProcess]:
    """Us, then Postfix, then the sink."""
    settings = PostfixSettings(next_hop=f"[{LOOPBACK}]:{sink.port}")
    postfix = PostfixInstance(tools, directory / "postfix", settings)
    if not dsn:
        with (postfix.directory / "config" / "main.cf").open("a") as file:
            file.write("smtpd_discard_ehlo_keywords = dsn, silent-discard\n")
    with postfix, RelayProcess(directory / "relay", next_hop=f"{LOOPBACK}:{postfix.smtp_port}") as relay:
        yield relay


def test_postfix_with_dsn_reports_for_us_in_our_clients_words(
    open_path: Path, sink: Sink, postfix_tools: PostfixTools
) -> None:
    with chain(open_path, sink, postfix_tools) as relay:
        relay.send(
            "b@example.com",
            message=TEXT,
            wishes=["NOTIFY=SUCCESS,FAILURE", ORCPT],
            mail=["RET=HDRS", "ENVID=QQ+2B7"],
        )
        first, second = sink.until(2, timeout=30)
        relay.wait_until_empty()
        assert not relay.events("dsn")
    (mail, dsn) = (first, second) if first.mail_from else (second, first)
    assert mail.recipients == ("b@example.com",)
    assert dsn.recipients == ("app@example.org",)
    report = Report(dsn.body)
    assert "X-Postfix-Queue-ID" in report.message
    assert report.message["Original-Envelope-Id"] == "QQ+7"
    assert report.recipients[0]["Original-Recipient"] == "rfc822;Bee+news@old.example"
    assert report.recipients[0]["Action"] == "relayed"
    assert b"The body." not in dsn.body


def test_postfix_with_dsn_returns_a_failure_whole_when_our_client_wants_that(
    open_path: Path, sink: Sink, postfix_tools: PostfixTools
) -> None:
    with chain(open_path, sink, postfix_tools) as relay:
        relay.send(
            "reject-550@example.com", message=TEXT, wishes=["NOTIFY=FAILURE"], mail=["RET=FULL", "ENVID=E7"]
        )
        (dsn,) = sink.until(1, timeout=30)
        assert not relay.events("dsn")
    report = Report(dsn.body)
    assert "X-Postfix-Queue-ID" in report.message
    assert report.message["Original-Envelope-Id"] == "E7"
    # Ours: the client gave none, and Postfix must know whom the client meant.
    assert report.recipients[0]["Original-Recipient"] == "rfc822;reject-550@example.com"
    assert report.recipients[0]["Action"] == "failed"
    assert report.returned.get_content_type() == "message/rfc822"
    assert b"The body." in dsn.body


def test_nobody_reports_what_nobody_wants_to_hear(
    open_path: Path, sink: Sink, postfix_tools: PostfixTools
) -> None:
    with chain(open_path, sink, postfix_tools) as relay:
        relay.send("reject-550@example.com", message=TEXT, wishes=["NOTIFY=NEVER"])
        relay.send("b@example.com", message=TEXT, wishes=["NOTIFY=FAILURE"])
        relay.send("reject-551@example.com", message=TEXT, wishes=["NOTIFY=FAILURE"])
        messages = sink.until(2, timeout=30)
        relay.wait_until_empty()
        assert not relay.events("dsn")
    (dsn,) = [each for each in messages if not each.mail_from]
    (failed,) = Report(dsn.body).recipients
    assert failed["Final-Recipient"] == "rfc822; reject-551@example.com"


def test_for_a_postfix_without_dsn_we_report_the_success(
    open_path: Path, sink: Sink, postfix_tools: PostfixTools
) -> None:
    with chain(open_path, sink, postfix_tools, dsn=False) as relay:
        relay.send(
            "b@example.com",
            message=TEXT,
            wishes=["NOTIFY=SUCCESS,FAILURE", ORCPT],
            mail=["RET=FULL", "ENVID=QQ+2B7"],
        )
        messages = sink.until(2, timeout=30)
        relay.wait_until_empty()
        (event,) = relay.events("dsn")
    assert event["kind"] == "relayed"
    (dsn,) = [each for each in messages if not each.mail_from]
    report = Report(dsn.body)
    assert "X-Zonerelay-Queue-Id" in report.message
    assert report.message["Original-Envelope-Id"] == "QQ+7"
    (relayed,) = report.recipients
    assert relayed["Original-Recipient"] == "rfc822; Bee+news@old.example"
    assert relayed["Action"] == "relayed"
    assert "queued as" in relayed["Diagnostic-Code"]
    assert report.returned.get_content_type() == "text/rfc822-headers"
