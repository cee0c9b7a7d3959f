"""Arguments to requests, and values to text."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import pytest

from tests.support.fake_relay import delivery
from zonerelay import __version__
from zonerelay.cli import arguments, relay
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import CliError
from zonerelay.model.delivery import DeliveryState
from zonerelay.operations.catalogue import OPERATIONS
from zonerelay.operations.operation import fields_of
from zonerelay.operations.requests import Acts, Drop, Filter, QueueList
from zonerelay.telemetry.events.records import TraceStep

ID = "019aa1f2b3c01f00"


def test_every_filter_reaches_the_request() -> None:
    line = (
        "queue list --sender a@b --recipient *@c --domain d --zone z --state held "
        "--older-than 2h --younger-than 5d --reply full"
    )
    parsed = arguments.parse(line.split())
    assert arguments.request_of(parsed, QueueList, filter={"message_id": ID}).filter == Filter(
        sender="a@b",
        recipient="*@c",
        domain="d",
        zone="z",
        state=DeliveryState.HELD,
        min_age=7200.0,
        max_age=432_000.0,
        reply_text="full",
        message_id=ID,
    )


def test_no_option_is_no_filter() -> None:
    assert arguments.request_of(arguments.parse(["queue", "list"]), QueueList) == QueueList()


def test_an_empty_sender_is_a_filter() -> None:
    """`--sender "$UNSET"` in a script must not become the whole queue."""
    parsed = arguments.parse(["queue", "drop", "--sender", ""])
    assert not arguments.request_of(parsed, Drop).filter.is_everything


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "required: COMMAND"),
        ("queue", "required: VERB"),
        ("queue burn", "unknown value 'burn'"),
        ("queue list --older-than 5", "has no unit"),
        ("queue list --older-than soon", "is not a duration"),
        ("queue list --state lost", "unknown value 'lost'"),
        ("queue list --limit -1", "not a number from 0"),
        ("queue show 12", "not a message id"),
        ("queue drop example.com", "not a message id"),
        ("queue drop --all --dom=example.com", "unknown option --dom=example.com; did you mean --domain?"),
        ("queue lst", "did you mean list?"),
        ("statu", "did you mean status?"),
        ("status now", "unexpected argument now"),
        ("queue retry --all --at yesterday", "is not a time; expected +2h"),
        ("queue retry --all --at 2020-01-01", "is in the past"),
        ("explain a@b --client nowhere", "'nowhere' is not an IP address"),
        ("explain a@b --size much", "is not a size such as"),
        ("explain a@b --header X-Stream", 'expected "Name: value"'),
        ("explain a@b --certificate ab", "not a SHA-256 fingerprint"),
    ],
)
def test_a_mistake_is_status_2_and_says_what(
    line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        arguments.parse(line.split())
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_what_a_field_does_not_take_is_told_with_its_option() -> None:
    parsed = arguments.parse(["acts", "--limit", "0"])
    with pytest.raises(CliError, match=r"^--limit: Expected `int` >= 1$") as caught:
        arguments.request_of(parsed, Acts)
    assert caught.value.status == 2


def parser_of(words: list[str], parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    for word in words:
        verbs = next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
        parser = verbs.choices[word]
    return parser


def test_each_command_of_an_operation_has_its_fields() -> None:
    parser = arguments.build()
    for operation in OPERATIONS:
        if operation.command:
            words = operation.command.split()
            of = parser_of(words, parser)
            flags = {field.option.flag for field in fields_of(operation.request)} - {""}
            changed = set((operation.flags or {}).values())
            assert len(flags - of._option_string_actions.keys()) <= len(changed), words
            assert changed <= of._option_string_actions.keys()


def test_a_command_is_the_same_whether_all_are_built_or_it_alone() -> None:
    for words in (["queue", "reroute", "--help"], ["user", "add", "--help"], ["explain", "--help"]):
        all_of_them, alone = (
            parser_of(words[:-1], built) for built in (arguments.build(), arguments.build(words))
        )
        assert all_of_them.format_help() == alone.format_help()


@pytest.mark.parametrize(
    "line",
    ["--help", "serve --help", "queue --help", "queue list --help", "queue bounce --help", "explain --help"],
)
def test_every_help_text_can_be_printed(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        arguments.parse(line.split())
    assert caught.value.code == 0
    assert "usage: zonerelay" in capsys.readouterr().out


def test_the_overview_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments.parse(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80
    tops = {each.top for commands in arguments.GROUPS.values() for each in commands}
    assert tops <= set(" ".join(lines).split())


def test_the_named_config_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(relay.ENVIRONMENT, "/from/environment.toml")
    assert relay.config_path(Path("here.toml")) == Path("here.toml")
    assert relay.config_path(None) == Path("/from/environment.toml")


def test_the_machines_config_comes_before_the_source_trees(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(relay.ENVIRONMENT, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(relay, "SYSTEM_CONFIG", tmp_path / "etc.toml")
    with pytest.raises(CliError, match="no configuration") as caught:
        relay.config_path(None)
    assert caught.value.status == 2
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "zonerelay.toml").touch()
    assert relay.config_path(None) == Path("config/zonerelay.toml")
    (tmp_path / "etc.toml").touch()
    assert relay.config_path(None) == tmp_path / "etc.toml"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (-5, "0s"),
        (0, "0s"),
        (59.9, "59s"),
        (60, "1m"),
        (3599, "59m"),
        (3600, "1h"),
        (3660, "1h1m"),
        (86_400, "1d"),
        (90_000, "1d1h"),
        (5 * 86_400 + 59 * 60, "5d"),
    ],
)
def test_a_span_shows_its_two_largest_units(seconds: float, shown: str) -> None:
    assert text.span(seconds) == shown


@pytest.mark.parametrize(
    ("octets", "shown"),
    [(0, "0 B"), (999, "999 B"), (4096, "4.0 KB"), (50 * 1024**2, "50 MB"), (3 * 1024**3, "3.0 GB")],
)
def test_a_size_is_rounded_for_people(octets: int, shown: str) -> None:
    assert text.size(octets) == shown


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 deliveries"), (1, "1 delivery"), (12_345, "12,345 deliveries")]
)
def test_counts_agree_with_their_noun(count: int, shown: str) -> None:
    assert text.deliveries(count) == shown


def test_senders_that_are_null_or_unknown_are_told_apart() -> None:
    assert (text.path(""), text.path(None), text.path("a@b")) == ("<>", "?", "a@b")


def test_a_narrow_terminal_keeps_ids_and_recipients() -> None:
    from rich.console import Console

    from zonerelay.cli.operate.queue import delivery_table

    row = delivery(1, reply="451 " + "x" * 300, recipient="someone@example.com")
    console = Console(width=80, file=io.StringIO(), markup=False)
    with console.capture() as capture:
        console.print(delivery_table([row], now=row.created + 60, wide=False))
    shown = capture.get().splitlines()[1]
    assert f"{1:016x}" in shown
    assert "someone@example.com" in shown
    assert "…" in shown
    assert len(shown) <= 80


@pytest.mark.parametrize("width", [80, 140])
def test_a_trace_shows_what_happened_to_whom_at_every_width(width: int) -> None:
    from rich.console import Console

    from zonerelay.cli.operate.log import trace_table

    recipient = "someone.with.a.long.name@subdomain.customer.example"
    step = TraceStep(at=1.7e9, event="next attempt", recipient=recipient, text="451 4.4.1 busy")
    console = Console(width=width, file=io.StringIO(), markup=False)
    with console.capture() as capture:
        console.print(trace_table([step], wide=width >= output.WIDE))
    shown = " ".join(capture.get().split())
    assert text.when(step.at) in shown
    assert "next attempt" in shown
    assert recipient in shown.replace(" ", "")
    assert "451 4.4.1 busy" in shown


def test_the_version_is_told_as_other_programs_tell_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments.parse(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"zonerelay {__version__}\n"
