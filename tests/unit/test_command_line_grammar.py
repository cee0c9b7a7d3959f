"""Commands: their arguments, the lines to the relay's socket, and what `explain` says of changes."""

import argparse
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.dkim import NOW, entry, keys_of
from tests.support.fake_relay import delivery
from zonerelay import __version__
from zonerelay.cli import arguments, relay
from zonerelay.cli.terminal import text
from zonerelay.cli.terminal.exits import CliError
from zonerelay.config import settings as options
from zonerelay.config.credentials.secrets import SecretError, read_secret
from zonerelay.config.settings import DkimMode, Settings, SpoolSettings, SrsSettings, ZoneSettings
from zonerelay.control.explain import change_plan, too_large_for
from zonerelay.control.socket import control_socket_path
from zonerelay.message.dkim.keys import DkimKeys
from zonerelay.message.srs import Srs
from zonerelay.model.delivery import DeliveryState
from zonerelay.operations import answers as messages
from zonerelay.operations.answers import BodyPiece, ChangePlan, EndFrame, ErrorFrame, Frame, Progress
from zonerelay.operations.catalogue import OPERATIONS, decode_call
from zonerelay.operations.errors import ControlError, ErrorKind, InvalidError
from zonerelay.operations.operation import fields_of
from zonerelay.operations.requests import Acts, Drop, Filter, QueueList
from zonerelay.sandbox import DIRECTORY
from zonerelay.telemetry.events.records import TraceStep


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
        ("report --since 999999d", "longer than 100 years"),
        ("log find --since 999999d", "longer than 100 years"),
        ("token add x --scope read --for 99999999d", "longer than 100 years"),
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
def test_a_mistake_is_status_2_and_told(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_the_machines_config_precedes_the_trees(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


SHOWN: list[tuple[Callable[[Any], str], dict[Any, str]]] = [  # Any: of several types
    (text.span, {-5: "0s", 0: "0s", 59.9: "59s", 60: "1m", 3599: "59m", 3600: "1h", 3660: "1h1m"}),
    (text.span, {86_400: "1d", 90_000: "1d1h", 5 * 86_400 + 59 * 60: "5d"}),
    (text.size, {0: "0 B", 999: "999 B", 4096: "4.0 KB", 50 * 1024**2: "50 MB", 3 * 1024**3: "3.0 GB"}),
    (text.deliveries, {0: "0 deliveries", 1: "1 delivery", 12_345: "12,345 deliveries"}),
    (text.path, {"": "<>", None: "?", "a@b": "a@b"}),
]


@pytest.mark.parametrize(("show", "values"), SHOWN)
def test_values_are_shown_to_people(show: Callable[[Any], str], values: dict[Any, str]) -> None:
    assert {value: show(value) for value in values} == values


def test_a_narrow_terminal_keeps_ids_and_recipients(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from zonerelay.cli.operate.queue import delivery_table

    row = delivery(1, reply="451 " + "x" * 300, recipient="someone@example.com")
    monkeypatch.setattr(time, "time", lambda: row.created + 60)
    console = Console(width=80, file=io.StringIO(), markup=False)
    with console.capture() as capture:
        console.print(delivery_table([row]))
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
        console.print(trace_table([step]))
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


# The control protocol's lines, and where its socket is


ROW = messages.DeliveryRow(
    message_id="0" * 16,
    zone="default",
    sender=None,
    recipient="a@example.com",
    domain="example.com",
    state="deferred",
    created=1.5,
    attempts=2,
    next_attempt=9.0,
    reply="451 4.3.0 two\nlines",
)
FRAMES: list[Frame] = [
    ROW,
    EndFrame(count=1, more=True),
    ErrorFrame(code=ErrorKind.NOT_FOUND, detail="no"),
    Progress(done=3),
    BodyPiece(octets=b"\r\n\xff"),
]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_a_frame_survives_the_wire_on_one_line(frame: Frame) -> None:
    line = messages.encode(frame)
    assert line.count(b"\n") == 1
    assert messages.decode_frame(line) == frame


def test_a_newer_relays_extra_field_does_not_hurt_an_older_command() -> None:
    line = messages.encode(ROW).replace(b'{"kind"', b'{"flavour":"new","kind"')
    assert messages.decode_frame(line) == ROW


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"[]\n",
        b"null\n",
        b'{"request":{}}\n',
        b'{"request":{"operation":"queue-burn"}}\n',
        # A filter that is ignored is a queue emptied.
        b'{"request":{"operation":"queue-list","filter":{"colour":"red"}}}\n',
        b'{"request":{"operation":"queue-list","limit":"many"}}\n',
        b'{"request":{"operation":"ping"}} trailing\n',
        b"\xff\xfe\n",
    ],
)
def test_what_is_no_request_is_refused(line: bytes) -> None:
    with pytest.raises(InvalidError):
        decode_call(line)


def test_only_an_empty_filter_is_everything() -> None:
    assert Filter().is_everything
    for some in (
        Filter(sender=""),
        Filter(domain="a"),
        Filter(min_age=0.0),
        Filter(state=DeliveryState.HELD),
    ):
        assert not some.is_everything


def _settings(spool: str, socket: str | None = None) -> Settings:
    return Settings(
        spool=SpoolSettings(path=Path(spool)),
        admin=options.AdminSettings(socket=Path(socket) if socket else None),
    )


@pytest.mark.parametrize(
    ("spool", "socket", "path"),
    [
        ("/var/lib/zonerelay/spool", None, Path("/var/lib/zonerelay/control.sock")),
        ("/spool", "/run/z/c.sock", Path("/run/z/c.sock")),
        ("var/spool", None, Path.cwd() / "var" / "control.sock"),
    ],
    ids=["beside the spool", "named", "beside the working directory"],
)
def test_where_the_socket_is(spool: str, socket: str | None, path: Path) -> None:
    assert control_socket_path(_settings(spool, socket)) == path


@pytest.mark.parametrize(("length", "fits"), [(107, True), (108, False)])
def test_a_path_that_the_system_cannot_hold_is_refused_in_words(length: int, fits: bool) -> None:
    settings = _settings("/spool", "/" + "s" * (length - 1))
    if fits:
        assert len(str(control_socket_path(settings))) == length
        return
    with pytest.raises(ControlError, match=r"has 108 bytes, .* set \[admin\] socket"):
        control_socket_path(settings)


# What `explain` says of the changes that a zone makes, and of who signs its mail


SRS = Srs(SrsSettings(domain="srs.example.com"), ["sixteen octets !!"])
PLAIN = ZoneSettings()
OFF = ZoneSettings(dkim=DkimMode.OFF)
REQUIRED = ZoneSettings(dkim=DkimMode.REQUIRED)


def both() -> DkimKeys:
    return keys_of(entry("example.com", "s1"), entry("example.com", "s2", "ed.pem"))


def of(
    zone: ZoneSettings,
    sender: str = "app@example.com",
    *froms: str,
    keys: Callable[[], DkimKeys | None] = both,
) -> ChangePlan | None:
    headers = [("From", value) for value in froms]
    return change_plan(zone, sender, headers, keys=keys, srs=SRS, now=NOW)


def found(plan: ChangePlan | None) -> ChangePlan:
    assert plan is not None
    return plan


def test_the_keys_are_those_for_the_author() -> None:
    plan = found(of(PLAIN, "bounce@other.example", "Ann <ann@example.com>"))
    assert plan.signed_by == (
        "s1._domainkey.example.com (rsa-sha256)",
        "s2._domainkey.example.com (ed25519-sha256)",
    )
    assert (plan.author, plan.author_assumed, plan.unsigned) == ("example.com", False, "")


def test_without_a_from_the_sender_is_taken_for_the_author() -> None:
    plan = found(of(PLAIN))
    assert (plan.author, plan.author_assumed, len(plan.signed_by)) == ("example.com", True, 2)


@pytest.mark.parametrize(
    ("sender", "froms", "why"),
    [
        ("app@example.net", (), "no key for example.net"),
        ("app@example.com", ("x@other.example",), "no key for other.example"),
        ("app@example.com", ("a@example.com", "b@example.com"), "the From address is unknown"),
        ("", (), "the From address is unknown"),
    ],
)
def test_it_says_why_nothing_is_signed(sender: str, froms: tuple[str, ...], why: str) -> None:
    for zone in (PLAIN, REQUIRED):
        plan = found(of(zone, sender, *froms))
        assert (plan.signed_by, plan.unsigned) == ((), why)
        assert plan.must_sign is (zone is REQUIRED)


def test_a_zone_that_signs_nothing_and_changes_nothing_has_no_plan() -> None:
    assert of(OFF) is None
    assert of(PLAIN, keys=lambda: None) is None


def test_keys_that_cannot_be_read_are_said_to_be() -> None:
    def unreadable() -> DkimKeys:
        return keys_of(entry("example.com", "s1", "nowhere.pem"))

    assert "nowhere.pem cannot be read" in found(of(PLAIN, keys=unreadable)).unsigned


def test_srs_and_rules_are_shown() -> None:
    zone = ZoneSettings(dkim=DkimMode.OFF, srs=True, header_remove=("X-Mailer",), header_add=("X-A: b",))
    plan = found(of(zone, "ann@first.example"))
    assert plan.sender.endswith("=first.example=ann@srs.example.com")
    assert (plan.removed, plan.replaced, plan.added) == (("X-Mailer",), (), ("X-A: b",))
    assert found(of(zone, "")).sender == ""


def test_a_message_that_is_too_large_for_the_zone_is_named() -> None:
    zone = ZoneSettings(name="small", max_message_size=1024)
    assert too_large_for(zone, 1024) == too_large_for(zone, None) == too_large_for(PLAIN, 10**9) == ""
    assert too_large_for(zone, 1025).startswith("552 5.3.4 the message has 1025 bytes, but zone small")


@pytest.mark.parametrize("text", ["first\nsecond\n", "nul\0", "tab\t"])
def test_a_file_with_more_than_a_secret_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "secret"
    file.write_text(text)
    with pytest.raises(SecretError, match="not one line of text") as refused:
        read_secret(str(file), {})
    assert text[:3] not in str(refused.value).replace(str(file), "")


def test_the_sandbox_of_another_user_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket could keep a command waiting for seconds, and there can be many."""
    (tmp_path / f"{DIRECTORY}x").mkdir()
    asked = list[Path]()

    def answers(path: Path) -> bool:
        asked.append(path)
        return True

    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("zonerelay.process.sockets.answers", answers)
    assert relay._sandbox() == tmp_path / f"{DIRECTORY}x" / "control.sock"
    asked.clear()
    monkeypatch.setattr("os.getuid", lambda: (tmp_path / f"{DIRECTORY}x").stat().st_uid + 1)
    assert relay._sandbox() is None
    assert asked == []
