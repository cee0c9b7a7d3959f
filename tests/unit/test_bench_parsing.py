"""What the bench reads from other programs and the kernel, and the figures it derives."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.bench import load
from tests.bench.client import ClientSession, Steps, opening
from tests.bench.driver import Load, envelope, message
from tests.bench.fsyncs import count_calls
from tests.bench.profiling import rank
from tests.bench.report import LABELS, metrics_of, number, remarks, rounds, verdict
from tests.bench.results import Result, Sample, percentile, ratio
from tests.bench.rows import POSTFIX, ROWS, ZONERELAY, Goal, Source, Tls, rows_named
from tests.bench.sink import SinkProtocol
from tests.bench.trials import TRIALS, Finding
from tests.support.debian import parse_depends, parse_ldd
from tests.support.meters import descendants, parse_busy, parse_cpu_stat, parse_rollup, parse_stat
from tests.support.postfix import PostfixSettings, main_cf, master_cf, smtps_service
from tests.support.process import parse_event, parse_metrics
from tests.support.toml import toml_document


def test_depends_gives_library_packages_without_versions_alternatives_and_libc() -> None:
    control = (
        "libc6 (>= 2.36), libdb5.3, libicu72 (>= 72.1~rc-1~), libssl3 | libssl1.1, debconf (>= 0.5), netbase"
    )
    assert parse_depends(control) == ["libdb5.3", "libicu72", "libssl3"]


def test_ldd_names_only_what_is_missing() -> None:
    output = "\tlibdb-5.3.so => not found\n\tlibc.so.6 => /lib/libc.so.6 (0x00007)\n\tlinux-vdso.so.1 (0x0)\n"
    assert parse_ldd(output) == {"libdb-5.3.so"}


@pytest.mark.parametrize(
    ("text", "messages", "sessions", "why"),
    [
        (b"", 0, 0, "nothing printed yet"),
        (b"sess=1 quit=0 mesg=7\rsess=2 quit=1 mesg=8\r", 8, 2, "the last one counts"),
        (b"t=1 mesg=9\rsess=2 quit=1 mesg=10\r", 10, 2, "the first may be cut"),
        (b"sess=2 quit=1 mesg=99\rsess=2 quit=1 mesg=1", 99, 2, "the last may be half written"),
    ],
)
def test_counters_of_smtp_sink(text: bytes, messages: int, sessions: int, why: str) -> None:
    counts = load.parse_counters(text)
    assert (counts.messages, counts.sessions) == (messages, sessions), why


def test_resumed_calls_of_strace_are_not_counted_twice() -> None:
    text = (
        "12 fdatasync(5 <unfinished ...>\n"
        "13 fsync(7)        = 0\n"
        "12 <... fdatasync resumed>) = 0\n"
        "12 +++ exited with 0 +++\n"
    )
    assert count_calls(text) == 2


def test_stat_survives_a_command_name_with_parentheses() -> None:
    text = "42 (a) b) S 7 42 42 0 -1 4194560 1 2 3 4 11 12 13 14 20 0 1 0"
    stat = parse_stat(text)
    assert stat.parent == 7
    assert stat.ticks == (11, 12, 13, 14)


def test_descendants_follow_every_generation_and_forget_dead_roots() -> None:
    assert descendants([2, 99], {2: 1, 3: 2, 4: 3, 5: 1}) == {2, 3, 4}


def test_kernel_figures_are_read_in_octets_and_seconds() -> None:
    assert parse_rollup("5-6 ---p 0 0 [rollup]\nRss:   8 kB\nPss:   3 kB\nPss_Dirty: 1 kB\n") == (3072, 8192)
    assert parse_cpu_stat("usage_usec 1500000\nuser_usec 1000000\n") == 1.5
    assert parse_busy("cpu  10 0 5 80 5 0 0 0 0 0\ncpu0 1 2 3\n") == (15, 100)


def test_percentile_is_the_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert percentile(values, 0.50) == 50.0
    assert percentile(values, 0.99) == 99.0
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([2.0, 1.0], 0.50) == 1.0


def test_figures_are_medians_over_every_repetition() -> None:
    row = rows_named("new")[0]
    result = Result(
        row, "zonerelay", samples=[Sample(1.0, 2.0, 5.0), Sample(2.0, 4.0, 6.0), Sample(50.0, 100.0, 7.0)]
    )
    assert result.accepted_rate == row.messages / 2.0
    assert result.delivered_rate == row.messages / 4.0
    assert result.cpu_ms == pytest.approx(6.0 / row.messages * 1000)
    assert any("noisy" in remark for remark in remarks([result])), "an outlier is told"


def test_a_goal_says_by_how_much_it_is_missed() -> None:
    row = rows_named("new")[0]
    ours = Result(row, "zonerelay", samples=[Sample(1.0, 2.0, 4.0)])
    theirs = Result(row, "postfix", samples=[Sample(1.0, 4.0, 8.0)])
    faster = Goal(metric="delivered_rate", limit=3.0, at_least=True)
    assert "missed by 33 %" in verdict(faster, ours, theirs)
    assert "reached" in verdict(Goal(metric="cpu_ms", limit=0.5, at_least=False), ours, theirs)
    assert "reached" in verdict(Goal(metric="cpu_ms", limit=0.8, at_least=False, absolute=True), ours, None)
    assert verdict(faster, ours, None) == "", "no ratio without the other relay"


def test_every_goal_names_a_figure() -> None:
    for row in ROWS:
        for goal in row.goals:
            assert goal.metric in LABELS
            if row.source is not Source.TRIAL:
                Result(row, "zonerelay").figure(goal.metric)


def test_every_trial_can_be_run() -> None:
    assert {row.key for row in ROWS if row.source is Source.TRIAL} == set(TRIALS)


def test_a_trial_shows_the_median_of_its_repetitions() -> None:
    (row,) = rows_named("idle")
    ours, theirs = Finding(row, ZONERELAY), Finding(row, POSTFIX)
    for value in (3.0, 1.0, 40.0):
        ours.add({"session_kb": value})
    assert ours.figure("session_kb") == 3.0
    assert metrics_of(ours) == ["session_kb"]
    assert theirs.figure("session_kb") is None, "a relay that failed has no figure"
    assert "reached" in verdict(row.goals[0], ours, theirs)


def test_two_versions_are_compared_round_by_round() -> None:
    (row,) = rows_named("new")
    before = [Sample(1.0, 1.0, cpu) for cpu in (1.0, 2.0, 4.0, 8.0)]
    after = [Sample(1.0, 1.0, cpu) for cpu in (1.1, 2.2, 4.4, 8.8)]
    (line,) = rounds([Result(row, "after", samples=after), Result(row, "before", samples=before)])
    assert "after / before, round by round: median 1.100" in line
    assert not rounds([Result(row, "after", samples=after[:3]), Result(row, "before", samples=before[:3])])


def test_postfix_gets_fewer_sessions_where_each_is_a_process() -> None:
    (row,) = rows_named("slow")
    assert (row.sessions_of(ZONERELAY), row.sessions_of(POSTFIX)) == (row.max_connections, 200)
    (row,) = rows_named("tls")
    assert row.sessions_of(POSTFIX) == row.sessions


OPENINGS = [
    (Tls.NONE, 0, [b"", b"EHLO"], "in clear text"),
    (Tls.STARTTLS, 0, [b"", b"EHLO", b"STARTTLS", None, b"EHLO"], "EHLO again behind the handshake"),
    (Tls.IMPLICIT, 2, [b"", b"EHLO", b"AUTH"], "the handshake was before the greeting"),
]


@pytest.mark.parametrize(("tls", "users", "expected", "why"), OPENINGS)
def test_a_session_begins_as_its_door_asks(
    tls: Tls, users: int, expected: list[bytes | None], why: str
) -> None:
    steps = list(opening(Load(port=1, sessions=1, messages=1, size=1, tls=tls, users=users)))
    verbs = [step if step is None else step[0].split(b" ")[0].strip() for step in steps]
    assert verbs == expected, why


def test_users_log_in_in_turn() -> None:
    load_of_two = Load(port=1, sessions=1, messages=1, size=1, tls=Tls.IMPLICIT, users=2)
    logins = [list(opening(load_of_two, number))[-1] for number in range(3)]
    assert logins[0] == logins[2] != logins[1]


def test_an_unknown_row_is_named_with_the_known_ones() -> None:
    assert [row.key for row in rows_named("latency,new")] == ["new", "latency"]
    with pytest.raises(ValueError, match="no row named bogus; there are: new"):
        rows_named("new,bogus")


def test_numbers_keep_three_digits() -> None:
    assert [number(value) for value in (None, 0.456, 12.34, 4321.0)] == ["–", "0.46", "12.3", "4,321"]
    assert ratio(None, 2.0) is None
    assert ratio(1.0, 0.0) is None


def test_recipients_of_a_message_are_spread_over_the_domains() -> None:
    commands = envelope(Load(port=1, sessions=1, messages=1, size=10, recipients=4, domains=2), 7)
    assert commands[0].startswith(b"MAIL FROM:<")
    assert [command.split(b"@")[1] for command in commands[1:-1]] == [
        b"d0.example.com>\r\n",
        b"d1.example.com>\r\n",
    ] * 2
    assert commands[-1] == b"DATA\r\n"


def test_content_has_its_size_and_no_bare_line_ends() -> None:
    content = message(4096)
    assert 4096 <= len(content) < 4096 + 512
    assert content.endswith(b"\r\n")
    assert content.replace(b"\r\n", b"").count(b"\n") == 0


class Replies(asyncio.Transport):
    """Keeps what the sink writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:  # Any: the base class takes every buffer type
        self.written += data

    def close(self) -> None:
        self.closed = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


def dialog() -> Steps:
    yield b"", 1
    yield b"EHLO x\r\n", 1
    yield b"MAIL\r\nRCPT\r\n", 2


@pytest.mark.parametrize("size", [1, 3, 10_000])
async def test_a_step_is_taken_when_all_replies_to_the_one_before_are_there(size: int) -> None:
    session, transport = ClientSession(dialog()), Replies()
    session.connection_made(transport)
    for replies, written in (
        (b"220 hi\r\n", b"EHLO x\r\n"),
        (b"250-x\r\n250 SIZE\r\n", b"EHLO x\r\nMAIL\r\nRCPT\r\n"),
        (b"250 ok\r\n250 ok\r\n", b"EHLO x\r\nMAIL\r\nRCPT\r\n"),
    ):
        for start in range(0, len(replies), size):
            assert not session.done.done()
            session.data_received(replies[start : start + size])
        assert transport.written == written
    assert session.done.result() is None
    assert transport.closed


async def test_a_reply_that_is_not_positive_ends_a_session() -> None:
    session, transport = ClientSession(dialog()), Replies()
    session.connection_made(transport)
    session.data_received(b"421 4.7.0 Too many connections\r\n")
    assert "421 4.7.0" in str(session.done.exception())
    assert transport.closed


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_the_sink_counts_messages_however_its_input_is_cut(size: int) -> None:
    one = b"MAIL FROM:<a@b>\r\nRCPT TO:<c@d>\r\nRCPT TO:<e@f>\r\nDATA\r\nx: y\r\n\r\n..\r\n.\r\n"
    stream = b"EHLO x\r\n" + one * 3 + b"QUIT\r\n"
    arrived: list[int] = []
    sink = SinkProtocol(lambda recipients, _: arrived.append(recipients))
    transport = Replies()
    sink.connection_made(transport)
    for start in range(0, len(stream), size):
        sink.data_received(stream[start : start + size])
    assert arrived == [2, 2, 2]
    assert transport.written.endswith(b"221 2.0.0 bye\r\n")
    assert transport.closed


def test_profile_ranks_functions_by_their_own_samples() -> None:
    frames = [{"name": "run", "file": "loop.py"}, {"name": "parse", "file": "a/lines.py"}]
    document = {
        "shared": {"frames": frames},
        "profiles": [{"samples": [[0, 1], [0], [0, 1]], "weights": [2, 1, 1]}],
    }
    assert rank(document, limit=5) == [("parse (lines.py)", 0.75, 0.75), ("run (loop.py)", 0.25, 1.0)]


def test_postfix_gets_a_next_hop_per_domain_or_one_for_all() -> None:
    lines = main_cf(PostfixSettings(transports={"a.example": "[127.0.0.9]:2525"}, connections_out=7))
    assert lines["transport_maps"] == "inline:{ { a.example = smtp:[127.0.0.9]:2525 } }"
    assert lines["default_destination_concurrency_limit"] == "7"
    assert "relayhost" not in lines
    assert main_cf(PostfixSettings(next_hop="[127.0.0.1]:26"))["relayhost"] == "[127.0.0.1]:26"
    assert "127.0.0.1:2500 inet n - n - - smtpd" in master_cf(2500)


def test_postfix_serves_tls_and_users_only_when_asked_to() -> None:
    plain = main_cf(PostfixSettings())
    assert not [name for name in plain if name.startswith(("smtpd_tls", "smtpd_sasl"))]
    lines = main_cf(PostfixSettings(certificate=Path("/c.pem"), key=Path("/c.key"), users={"a": "b"}))
    assert (lines["smtpd_tls_security_level"], lines["smtpd_tls_key_file"]) == ("may", "/c.key")
    assert lines["smtpd_sasl_auth_enable"] == "yes"
    assert "wrappermode=yes" in smtps_service(4650)


def test_toml_has_tables_and_arrays_of_tables() -> None:
    text = toml_document(
        {"hostname": "relay.test"},
        {
            "spool": {"path": "/x", "quota": 5},
            "zone": [{"name": "a", "ipv6": False}, {"servers": ["1", "2"]}],
        },
    )
    assert text == (
        'hostname = "relay.test"\n\n[spool]\npath = "/x"\nquota = 5\n'
        '\n[[zone]]\nname = "a"\nipv6 = false\n\n[[zone]]\nservers = ["1", "2"]\n'
    )


def test_log_lines_that_are_no_events_are_passed_over() -> None:
    assert parse_event('{"event": "ready"}') == {"event": "ready"}
    assert parse_event("Traceback (most recent call last):") is None
    assert parse_event('{"event": "acc') is None
    assert parse_event("3") is None


def test_metrics_are_keyed_by_name_and_sorted_labels() -> None:
    text = '# TYPE zonerelay_x counter\nzonerelay_x_total{zone="a",outcome="b"} 3\n# TYPE y gauge\ny 1.5\n'
    assert parse_metrics(text) == {'zonerelay_x_total{outcome="b",zone="a"}': 3.0, "y": 1.5}
