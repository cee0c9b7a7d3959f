"""The file of a history: what is dropped when it cannot be written, age, size, index and format."""

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.event_log import EventLog, events_into
from tests.support.ports import wait_until
from zonerelay.config.credentials import file as credentials
from zonerelay.config.settings import Settings, SpoolSettings
from zonerelay.control import history as control_history
from zonerelay.history import database as files
from zonerelay.history import reader, writer
from zonerelay.history.reader import Histories, Query, TooLongError, steps
from zonerelay.history.writer import History
from zonerelay.inbound.access.guard import WatchedFile
from zonerelay.model.clock import ManualClock, SystemClock
from zonerelay.model.delivery import Delivery, queue_of
from zonerelay.model.envelope import Mailbox, MessageId
from zonerelay.model.reply import Outcome, Reply, Verdict
from zonerelay.operations.errors import BusyError
from zonerelay.operations.requests import HistoryFind
from zonerelay.process.threads import ThreadPool
from zonerelay.telemetry.events.events import Events
from zonerelay.telemetry.logs.redact import Redactor, SearchForms
from zonerelay.telemetry.metrics.metrics import Metrics

DAY = 86_400.0
REDACTOR = Redactor(b"", enabled=False)


class Kept:
    """A history with its file, and what it told of trouble."""

    def __init__(self, home: Path) -> None:
        self.file = writer.file_of(home, 0)
        self.dropped = Metrics().history_dropped
        self.told: list[str] = []
        self.restored: list[int] = []
        self.history = History(
            self.file, REDACTOR, keep=DAY, max_size=2**20, guard=0, clock=SystemClock(), dropped=self.dropped
        )
        self.history.tell(self.told.append, self.restored.append)

    def put(self, recipient: str, **fields: str) -> None:
        self.history.put("accepted", {"id": "0" * 16, "sender": "a@example.org", "to": recipient, **fields})

    def keep(self, recipient: str, **fields: str) -> None:
        """Put it in, and wait until it is found."""
        self.put(recipient, **fields)
        assert wait_until(lambda: self.finds(recipient), timeout=10)

    def finds(self, address: str) -> bool:
        with Histories(self.file.parent, None) as histories:
            return bool(histories.find(Query(any=SearchForms(frozenset({address}))), 10)[0])

    def whys(self) -> list[str]:
        with Histories(self.file.parent, None) as histories:
            return [gap.why for gap in histories.gaps(0.0, 9e9)]


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    made = Kept(tmp_path)
    yield made
    made.history.close()


def test_what_does_not_fit_in_memory_is_counted_and_told(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MOST", 10)
    kept.keep("first@example.com")
    other = sqlite3.connect(kept.file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for number in range(25):
        kept.put(f"n{number}@example.com")
    assert kept.dropped.value == 15
    other.execute("ROLLBACK")
    other.close()
    assert wait_until(lambda: not kept.history._queue, timeout=10)  # emptied after the commit
    assert kept.finds("n9@example.com")
    kept.keep("later@example.com")
    assert not kept.finds("n10@example.com")
    assert [why for why in kept.whys() if why.startswith("15 events were dropped")]


def test_an_unwritable_directory_is_told_once_and_later(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "AGAIN", 0.05)
    kept.file.parent.write_text("no directory")
    kept.put("first@example.com")
    assert wait_until(lambda: bool(kept.told), timeout=10)
    assert kept.history.problems()
    kept.file.parent.unlink()
    assert wait_until(lambda: kept.restored == [0], timeout=10)
    assert len(kept.told) == 1
    assert kept.finds("first@example.com")
    assert not kept.history.problems()


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_file_that_is_removed_while_the_relay_runs_is_begun_again(kept: Kept, how: str) -> None:
    kept.keep("first@example.com")
    for each in list(kept.file.parent.iterdir()):
        each.unlink()
    if how == "replaced":
        kept.file.write_bytes(b"")
    kept.keep("second@example.com")
    assert [str(kept.file) in text for text in kept.told] == [True]
    assert not kept.history.problems()


def test_a_file_of_a_later_release_is_set_aside(kept: Kept) -> None:
    database = files.open_for_writing(kept.file)
    database.execute("PRAGMA user_version = 9")
    database.close()
    kept.keep("first@example.com")
    assert any("format 9" in why for why in kept.whys())
    assert kept.file.with_name("00.db.aside").exists()


def test_events_are_stored_once_although_old_ones_cannot_be_removed(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = files.trim, [sqlite3.OperationalError("database or disk is full")]

    def trim(database: sqlite3.Connection, before: float, most: int) -> bool:
        if failures:
            raise failures.pop()
        return real(database, before, most)

    monkeypatch.setattr(files, "trim", trim)
    monkeypatch.setattr(writer, "AGAIN", 0.05)
    kept.put("first@example.com")
    assert wait_until(lambda: bool(kept.restored), timeout=10)
    kept.keep("second@example.com")
    with contextlib.closing(sqlite3.connect(kept.file)) as database:
        stored = [text for (text,) in database.execute("SELECT events FROM block")]
    assert sum(text.count("first@example.com") for text in stored) == 1
    assert len(kept.told) == 1


def test_a_copy_next_to_the_files_is_not_searched(kept: Kept) -> None:
    kept.keep("first@example.com")
    kept.file.with_name("00.old.db").write_bytes(kept.file.read_bytes())
    assert kept.finds("first@example.com")
    assert not kept.whys()[1:]


@pytest.mark.parametrize("damage", ["torn", "[[1]]", b"\xff"])
def test_a_damaged_block_is_a_gap(kept: Kept, damage: str | bytes) -> None:
    kept.keep("first@example.com")
    with contextlib.closing(sqlite3.connect(kept.file)) as database, database:
        database.execute("UPDATE block SET events = ?, refused = 1", (damage,))
    assert not kept.finds("first@example.com")
    with Histories(kept.file.parent, None) as histories:
        assert list(histories.since(0.0)) == []
        assert "damaged" in histories.gaps(0.0, 9e9)[0].why
    with Histories(kept.file.parent, None) as histories:
        assert histories.refused_more(Query()) == 0


def test_half_of_a_surrogate_pair_spoils_no_block(kept: Kept) -> None:
    kept.keep("half@example.com", helo="\udcff")


def events(count: int, at: float) -> list[files.Event]:
    return [
        (at, "accepted", {"id": f"{number:016x}", "sender": "s@example.org", "to": f"u{number}@example.com"})
        for number in range(count)
    ]


def test_old_blocks_go_and_nothing_younger(tmp_path: Path) -> None:
    database = files.open_for_writing(tmp_path / "history" / "00.db")
    row = files.insert(database, 1, events(files.BLOCK * 300, 1000.0))
    row = files.insert(database, row, events(files.BLOCK * 10, 5000.0))
    while files.trim(database, 3000.0, 2**30):
        pass
    assert database.execute("SELECT count(*), min(last) FROM block").fetchone() == (10, 5000.0)
    assert database.execute("SELECT min(row) FROM term").fetchone() == (row - 10,)
    assert list(files.rows_with(database, ["u5@example.com"])) == [row - 10]
    database.close()


def test_a_full_file_gives_up_its_oldest_blocks(tmp_path: Path) -> None:
    database = files.open_for_writing(tmp_path / "history" / "00.db")
    row = 1
    for at in range(12):
        row = files.insert(database, row, events(files.BLOCK * files.PART // 2, float(at)))
    most = files.used(database) // 2
    while files.trim(database, 0.0, most):
        pass
    assert files.used(database) <= most
    assert database.execute("SELECT max(last) FROM block").fetchone() == (11.0,)
    database.close()


def test_a_number_of_the_index_that_two_values_share_finds_only_the_right_one(tmp_path: Path) -> None:
    database = files.open_for_writing(tmp_path / "history" / "00.db")
    files.insert(database, 1, events(1, 1.0))
    database.execute("INSERT INTO term VALUES (0, ?, 1)", (files.number_of("other@example.com"),))
    with Histories(tmp_path / "history", None, 2.0) as histories:
        assert histories.find(Query(any=SearchForms(frozenset({"other@example.com"}))), 10) == ([], False)
        assert len(histories.find(Query(any=SearchForms(frozenset({"u0@example.com"}))), 10)[0]) == 1
    database.close()


def test_recipients_with_the_same_result_share_an_event_and_are_found_one_by_one(kept: Kept) -> None:
    names = [Mailbox(f"u{number}@example.com") for number in range(5)]
    told = Events(EventLog(), Metrics(), REDACTOR, SystemClock(), kept.history)
    reply = Reply(250, "2.0.0", "ok")
    outcomes = [Outcome(Verdict.DELIVERED, reply, host="mx.example.com") for _ in names]
    outcomes[2] = Outcome(Verdict.DELIVERED, reply, host="other.example.com")
    deliveries = [
        Delivery(queue=queue_of("default"), message_id=MessageId("1" * 16), recipient=each, created=1.0)
        for each in names
    ]
    told.attempted([(*each, None) for each in zip(deliveries, outcomes, strict=True)], destination="d")
    assert wait_until(lambda: kept.finds(names[4]), timeout=10)
    with contextlib.closing(sqlite3.connect(kept.file)) as database:
        assert sum(len(files.decode(text)) for (text,) in database.execute("SELECT events FROM block")) == 3
    with Histories(kept.file.parent, None) as histories:
        found = {each.recipient: each.host for each in histories.find(Query(outcome="delivered"), 10)[0]}
        assert found == {each: outcome.host for each, outcome in zip(names, outcomes, strict=True)}
        assert [each.recipient for each in steps(histories.records("1" * 16), "1" * 16, {})] == names
    with contextlib.closing(files.open_for_writing(kept.file)) as database:
        assert files.forget(database, [names[1]], "forgotten") == 1
    assert not kept.finds(names[1])
    assert kept.finds(names[0])


@pytest.mark.parametrize(
    ("value", "reply", "left"),
    [
        ("bob@example.com", "\u0130\u0130 Bob@example.com", "\u0130\u0130 forgotten"),
        ("\u00fcl@example.com", "\u00dcl@example.com", "forgotten"),
        ("reply", "Reply", "forgotten"),
        ("forgotten", "forgotten", "forgotten"),
        ("1", "250 1", "250 forgotten"),
        ("a@b.org", "<a@b.org>, dana@b.org, a@b.org.uk", "<forgotten>, dana@b.org, a@b.org.uk"),
    ],
)
def test_what_is_forgotten_changes_nothing_else(tmp_path: Path, value: str, reply: str, left: str) -> None:
    with contextlib.closing(files.open_for_writing(tmp_path / "history" / "00.db")) as database:
        files.insert(database, 1, [(11.0, "delivered", {"reply": reply, "attempt": 1})])
        assert files.forget(database, [value], "forgotten") == 1
        (found,) = database.execute("SELECT events FROM block").fetchone()
    assert files.decode(found) == [(11.0, "delivered", {"reply": left, "attempt": 1})]


@pytest.mark.parametrize("many", [True, False], ids=["read for the outcome", "by the index"])
def test_a_search_asks_no_part_of_the_index_that_is_older_than_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, many: bool
) -> None:
    monkeypatch.setattr(reader, "_MANY", 3 if many else 1000)
    database = files.open_for_writing(tmp_path / "history" / "00.db")
    row, asked = 1, 0
    for at in range(0, 100 * 3600, 3600):
        message_id = f"{at * 1000:011x}00000"
        common: dict[str, files.Field] = {"id": message_id, "recipient": "u@example.com"}
        outcome = "bounced" if at % 7200 else "delivered"
        some: list[files.Event] = [
            (at + 0.0, "accepted", {"id": message_id, "sender": "s@example.org", "to": "u@example.com"}),
            (at + 1.0, "deferred", common),
            (at + 1800.0, outcome, common),
        ]
        row = files.insert(database, (row // files.PART + 1) * files.PART, some)  # a part of its own
    database.close()

    def count(statement: str) -> None:
        nonlocal asked
        asked += "FROM term" in statement

    with Histories(tmp_path / "history", None, 9e9) as histories:
        histories.files[0].database.set_trace_callback(count)
        query = Query(sender=SearchForms(frozenset({"s@example.org"})), outcome="bounced")
        found, more = histories.find(query, 5)
        assert [(each.outcome, each.attempts) for each in found] == [("bounced", 0)] * 5
        assert more
        assert asked < 200


def test_a_search_that_takes_too_long_is_ended_and_no_fault_of_the_file(kept: Kept) -> None:
    kept.keep("first@example.com")
    searched = Query(reply="no such reply")
    with Histories(kept.file.parent, None, longest=60.0) as histories:
        assert histories.find(searched, 10) == ([], False)
        assert histories.refused_more(searched) == 0
    with Histories(kept.file.parent, None, longest=0.0) as histories:
        for query in (searched, Query(any=SearchForms(frozenset({"first@example.com"})))):
            with pytest.raises(TooLongError):
                histories.find(query, 10)
        assert histories.broken == []


def test_what_sqlite_does_within_one_statement_is_ended_too(kept: Kept) -> None:
    kept.keep("first@example.com")
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n"
    with (
        Histories(kept.file.parent, None, longest=0.1) as histories,
        pytest.raises(sqlite3.OperationalError, match="interrupted"),
    ):
        histories.files[0].database.execute(endless).fetchone()


async def test_slow_searches_stop_no_log_in_and_those_that_are_too_many_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def slow(search: control_history.HistorySearch, _: HistoryFind) -> str:
        assert search.longest == control_history.LONGEST
        go.wait(60)
        return "found"

    monkeypatch.setattr(control_history.HistorySearch, "search", slow)
    search = control_history.HistorySearch(Settings(), 0.0).search
    searches = [asyncio.create_task(control_history.ask(search, HistoryFind())) for _ in range(40)]
    try:
        refused, _ = await asyncio.wait(searches, timeout=30, return_when=asyncio.FIRST_EXCEPTION)
        assert refused
        assert all(isinstance(each.exception(), BusyError) for each in refused)
        users = tmp_path / "users"
        users.write_text("")
        watch = WatchedFile(users, credentials.read, events=events_into(EventLog(), ManualClock()))
        async with asyncio.timeout(30):
            await watch.refresh()
            assert watch.content == {}
            await control_history.ask(dict)  # one message of an application
    finally:
        go.set()
    done: list[object] = await asyncio.gather(*searches, return_exceptions=True)
    assert done.count("found") == 6


async def test_a_search_without_a_thread_has_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_history, "LOOKUPS", ThreadPool("full", 1, most=0))
    settings = Settings(spool=SpoolSettings(path=tmp_path / "spool"))
    with pytest.raises(BusyError, match="try again"):
        await control_history.HistorySearch(settings, 0.0).found(HistoryFind())
