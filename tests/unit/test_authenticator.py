"""Log-ins against a real file with real hashes: failures, remembered passwords, and lanes to the threads."""

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.credentials import file_of, user
from tests.support.event_log import EventLog
from zonerelay.config.credentials import passwords
from zonerelay.config.settings import AuthSettings
from zonerelay.inbound.access import auth
from zonerelay.inbound.access.auth import MIN_REMEMBERED, LoginKind, PasswordChecks, RememberedPasswords
from zonerelay.inbound.limits import clients as attempts
from zonerelay.inbound.limits.clients import MAX_KEYS, FailedAttempts
from zonerelay.model.clock import ManualClock
from zonerelay.smtp.server.sasl import Credentials
from zonerelay.telemetry.events.events import Events
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.telemetry.metrics.metrics import Metrics

CLIENT = "192.0.2.1"
RIGHT = Credentials("app", "correct horse")
WRONG = Credentials("app", "battery staple")
CHANGED = Credentials("app", "battery staple")
NOBODY = Credentials("nobody", "correct horse")


class Door:
    """An authenticator with everything around it, and counts of what it does."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "credentials"
        self.file.write_text(file_of(user(), user("crm", "another password", "example.com")))
        self.clock = ManualClock()
        self.log = EventLog()
        self.metrics = Metrics()
        self.hashed: list[str] = []
        self.slept: list[float] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fault: Exception | None = None
        self.guesses = 0
        self.shared: list[str] = []
        self.settings = AuthSettings(credentials=self.file)
        self.authenticator = auth.Authenticator(
            self.settings,
            clock=self.clock,
            events=Events(self.log, self.metrics, Redactor(bytes(32), enabled=True), self.clock),
            secret=bytes(32),
            matches=self._matches,
            sleep=self._sleep,
            share=self.shared.append,
        )

    def _matches(self, stored_hash: str, password: str) -> bool:
        self.hashed.append(stored_hash)
        assert self.gate.wait(10)
        if self.fault:
            raise self.fault
        return passwords.matches(stored_hash, password)

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    async def login(self, credentials: Credentials, client: str = CLIENT) -> LoginKind:
        return (await self.check(credentials, client)).kind

    async def guess(self, count: int, user: str, client: str = CLIENT) -> list[LoginKind]:
        """Other guesses, from clients whose number is in their address."""
        each = (Credentials(user.format(n), f"guess {n}") for n in range(count))
        return [await self.login(one, client.format(n)) for n, one in enumerate(each)]

    async def check(self, credentials: Credentials, client: str = CLIENT) -> auth.LoginResult:
        if credentials is WRONG:  # another guess each time: the same one counts once
            self.guesses += 1
            credentials = Credentials(WRONG.user, f"{WRONG.password} {self.guesses}")
        return await self.authenticator.check(credentials, client)

    def replace(self, text: str) -> None:
        """As `zonerelay user` does it: another inode."""
        draft = self.file.with_name("draft")
        draft.write_text(text)
        draft.replace(self.file)

    def counted(self, result: str) -> int:
        return self.metrics.logins._numbers[result,]


@pytest.fixture
async def door(tmp_path: Path) -> Door:
    return Door(tmp_path)


@pytest.fixture(autouse=True)
def _closed(door: Door) -> Iterator[None]:
    yield
    door.gate.set()
    door.authenticator.close()


async def test_the_right_password_brings_the_user_with_the_senders(door: Door) -> None:
    login = await door.check(Credentials("crm", "another password"))
    assert login == auth.LoginResult(LoginKind.OK, user("crm", "another password", "example.com"))
    assert door.slept == []


async def test_an_unknown_user_costs_and_gets_what_a_wrong_password_does(door: Door) -> None:
    unknown = await door.check(NOBODY, "192.0.2.1")
    wrong = await door.check(WRONG, "192.0.2.2")
    assert unknown.kind is wrong.kind is LoginKind.WRONG
    assert unknown.user is wrong.user is None
    assert door.slept == [0.5, 0.5]
    of_nobody, of_app = door.hashed
    assert of_nobody != of_app
    assert of_nobody.rsplit("$", 2)[0] == of_app.rsplit("$", 2)[0]  # the same memory, passes and lanes


async def test_the_user_of_nobodys_hash_cannot_log_in(door: Door) -> None:
    """Whatever the hash function says: there is no such user."""
    door.authenticator._checks._matches = lambda _hash, _password: True
    assert await door.login(NOBODY) is LoginKind.WRONG
    assert await door.login(WRONG) is LoginKind.OK  # the lie was believed for a user who is there


# ---- remembering -----------------------------------------------------------------------------


async def test_an_application_that_logs_in_for_every_message_is_hashed_once(door: Door) -> None:
    for _ in range(50):
        assert await door.login(RIGHT) is LoginKind.OK
    assert len(door.hashed) == 1
    assert door.counted("ok") == 50
    door.clock.advance(auth.REMEMBERED_FOR)
    assert await door.login(RIGHT) is LoginKind.OK
    assert len(door.hashed) == 2


async def test_a_change_of_one_user_costs_the_others_no_hash(door: Door) -> None:
    for client in range(200):
        assert await door.login(RIGHT, f"192.0.2.{client}") is LoginKind.OK
    before = list(door.hashed)
    door.replace(door.file.read_text() + "# another user\n")
    # All come before the file has been read again.
    logins = await asyncio.gather(*(door.login(RIGHT, f"192.0.2.{client}") for client in range(200)))
    assert logins == [LoginKind.OK] * 200
    assert door.hashed == before
    assert len(door.log.named("credentials-read")) == 2


async def test_what_was_remembered_of_a_user_who_changes_or_goes_counts_no_more(door: Door) -> None:
    text = door.file.read_text()
    assert await door.login(RIGHT) is LoginKind.OK
    hashed = passwords.make_hash("another horse")
    door.replace(re.sub(r"(?m)^app:[^:\n]*", f"app:{hashed}", text))
    assert await door.login(RIGHT) is LoginKind.WRONG
    door.replace(re.sub(r"(?m)^app:.*\n", "", text))
    assert await door.login(RIGHT) is LoginKind.WRONG
    door.replace(text.replace("app:", "app2:", 1))
    assert await door.login(RIGHT) is LoginKind.WRONG


async def test_a_wrong_password_is_never_remembered(door: Door) -> None:
    for _ in range(3):
        assert await door.login(RIGHT) is LoginKind.OK
        assert await door.login(WRONG) is LoginKind.WRONG
    assert len(door.hashed) == 4


async def test_another_file_of_the_configuration_is_read(door: Door, tmp_path: Path) -> None:
    assert await door.login(RIGHT) is LoginKind.OK
    other = tmp_path / "other"
    other.write_text(file_of(user("app", "battery staple")))
    door.authenticator.configure(AuthSettings(credentials=other, max_client_failures=1))
    assert await door.login(CHANGED) is LoginKind.OK
    assert await door.login(RIGHT) is LoginKind.WRONG
    assert await door.login(CHANGED) is LoginKind.LOCKED


# ---- a broken file ---------------------------------------------------------------------------


async def test_a_missing_file_is_nobodys_fault_and_said_once(door: Door) -> None:
    door.file.unlink()
    for _ in range(3):
        login = await door.check(RIGHT)
        assert login.kind is LoginKind.BROKEN
        assert "credentials: No such file or directory" in login.detail
    assert len(door.log.named("credentials-broken")) == 1
    assert door.authenticator.problem
    assert (door.hashed, door.slept, door.counted("broken")) == ([], [], 3)
    door.replace(file_of(user()))
    assert await door.login(RIGHT) is LoginKind.OK
    assert door.authenticator.problem == ""
    assert door.log.named("credentials-read") == [{"users": 1}]


async def test_a_malformed_file_is_said_once_per_change_with_its_line(door: Door) -> None:
    assert await door.login(RIGHT) is LoginKind.OK
    for _ in range(2):
        door.replace(file_of(user()) + "crm:another password\n")
        for _ in range(2):
            assert await door.login(RIGHT) is LoginKind.BROKEN
    [first, second] = door.log.named("credentials-broken")
    assert first == second
    assert str(first["problem"]).endswith(
        "credentials:2: the hash is not an argon2id hash as written by zonerelay user"
    )
    assert {level for level, event, _ in door.log.entries if event == "credentials-broken"} == {"error"}
    door.replace(file_of(user()))
    assert await door.login(RIGHT) is LoginKind.OK


async def test_a_broken_file_locks_nobody_out(door: Door) -> None:
    door.replace("broken\n")
    for _ in range(30):
        assert await door.login(WRONG) is LoginKind.BROKEN
    door.replace(file_of(user()))
    assert await door.login(RIGHT) is LoginKind.OK


async def test_an_unreadable_file_recovers_unchanged(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor left, for example: the file is the same when it can be read again."""
    real = Path.open

    def refuse(*_arguments: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Path, "open", refuse)
    for _ in range(3):
        assert await door.login(RIGHT) is LoginKind.BROKEN
    assert len(door.log.named("credentials-broken")) == 1
    monkeypatch.setattr(Path, "open", real)
    assert await door.login(RIGHT) is LoginKind.OK


async def test_unexpected_trouble_is_temporary_and_reported(door: Door) -> None:
    door.fault = MemoryError("no memory")
    assert await door.login(RIGHT) is LoginKind.BROKEN
    [trouble] = door.log.named("trouble")
    assert (trouble["where"], trouble["error"]) == ("auth", "MemoryError: no memory")
    door.fault = None
    assert await door.login(RIGHT) is LoginKind.OK


async def test_a_closed_authenticator_answers(door: Door) -> None:
    door.authenticator.close()
    assert await door.login(RIGHT) is LoginKind.BROKEN


# ---- failures --------------------------------------------------------------------------------


async def test_answers_to_wrong_passwords_come_later_and_later_then_not_at_all(door: Door) -> None:
    for _ in range(10):
        assert await door.login(WRONG) is LoginKind.WRONG
    assert door.slept == [0.5, 1, 2, 4, 8, 10, 10, 10, 10, 10]
    assert await door.login(WRONG) is LoginKind.LOCKED
    assert (len(door.hashed), len(door.slept)) == (10, 10)
    assert (door.counted("wrong"), door.counted("locked")) == (10, 1)


async def test_a_lock_is_for_one_client_and_a_time_also_where_the_password_is_known(door: Door) -> None:
    """Else the lock would open for the right guess, and guessing would cost nothing."""
    assert await door.login(RIGHT) is LoginKind.OK
    await door.guess(10, "app")
    assert await door.login(RIGHT) is LoginKind.LOCKED
    assert await door.login(RIGHT, "192.0.2.2") is LoginKind.OK
    door.clock.advance(door.settings.forget_failures)
    assert await door.login(RIGHT) is LoginKind.OK


async def test_loopback_and_unix_sockets_can_be_locked_too(door: Door) -> None:
    for client in ("127.0.0.1", "::1", ""):
        await door.guess(10, "app", client)
        assert await door.login(RIGHT, client) is LoginKind.LOCKED


async def test_one_customers_ipv6_addresses_are_one_client(door: Door) -> None:
    await door.guess(10, "app", "2001:db8::{}")
    assert await door.login(RIGHT, "2001:db8::ffff:1:2:3") is LoginKind.LOCKED
    assert await door.login(RIGHT, "2001:db8:0:1::1") is LoginKind.OK


async def test_a_success_ends_the_delay_but_does_not_forgive(door: Door) -> None:
    for _ in range(9):
        await door.login(WRONG)
    await door.login(RIGHT)
    assert await door.login(NOBODY) is LoginKind.WRONG
    assert door.slept[-2:] == [10.0, 0.5]
    assert await door.login(Credentials("crm", "another password")) is LoginKind.LOCKED


async def test_guesses_side_by_side_get_no_more_answers_than_one_after_another(door: Door) -> None:
    door.gate.clear()
    guesses = [Credentials("app", f"guess {number}") for number in range(20)] + [RIGHT]
    tasks = [asyncio.create_task(door.login(guess)) for guess in guesses]
    await asyncio.sleep(0)
    door.gate.set()
    kinds = await asyncio.gather(*tasks)
    assert kinds.count(LoginKind.WRONG) == 10
    assert kinds[-1] is LoginKind.LOCKED


async def test_a_client_that_does_not_wait_has_failed_where_its_hash_was_begun(door: Door) -> None:
    await door.check(RIGHT, "192.0.2.2")  # reads the file
    door.gate.clear()
    for number in range(10):
        door.hashed.clear()
        task = asyncio.create_task(door.check(Credentials("app", f"guess {number}"), "198.51.100.1"))
        while not door.hashed:
            await asyncio.sleep(0.001)
        waiting = asyncio.create_task(door.check(Credentials("app", "never computed"), "198.51.100.1"))
        await asyncio.sleep(0)
        for each in (task, waiting):
            each.cancel()
            with pytest.raises(asyncio.CancelledError):
                await each
        door.gate.set()
        await door.authenticator._tasks.wait()
        door.gate.clear()
        assert len(door.hashed) == 1
    door.gate.set()
    assert await door.login(RIGHT, "198.51.100.1") is LoginKind.LOCKED
    assert door.slept == []
    assert len(door.log.named("login-failed")) == 11


# ---- many addresses, one target --------------------------------------------------------------


async def test_a_network_is_locked_by_many_clients_of_it_and_no_other_is(door: Door) -> None:
    door.authenticator.configure(AuthSettings(credentials=door.file, max_network_failures=20))
    assert await door.guess(25, "name{}", "203.0.113.{}") == [LoginKind.WRONG] * 20 + [LoginKind.LOCKED] * 5
    assert await door.login(RIGHT, "203.0.113.200") is LoginKind.LOCKED
    assert await door.login(RIGHT, "203.0.114.1") is LoginKind.OK
    assert len(door.hashed) == 21


async def test_an_account_is_locked_for_those_who_have_not_been_there_and_for_no_regular(door: Door) -> None:
    door.authenticator.configure(AuthSettings(credentials=door.file, max_account_failures=20))
    assert await door.login(RIGHT, "192.0.2.7") is LoginKind.OK
    assert await door.guess(25, "app", "10.{}.0.1") == [LoginKind.WRONG] * 20 + [LoginKind.LOCKED] * 5
    assert await door.login(RIGHT, "10.99.0.1") is LoginKind.LOCKED  # also right, from where nobody knows it
    door.clock.advance(auth.REMEMBERED_FOR)
    for place in ("192.0.2.7", "192.0.2.8"):  # another address of its network
        assert await door.login(RIGHT, place) is LoginKind.OK
    assert await door.login(Credentials("crm", "another password"), "10.99.0.1") is LoginKind.OK


async def test_an_account_that_is_not_there_is_locked_as_one_that_is(door: Door) -> None:
    door.authenticator.configure(AuthSettings(credentials=door.file, max_account_failures=3))
    for name in ("app", "nobody", "x" * 5000):
        assert await door.guess(4, name, f"10.{{}}.{len(name) % 200}.1") == [LoginKind.WRONG] * 3 + [
            LoginKind.LOCKED
        ]


async def test_guesses_at_others_lock_no_regular_out_at_the_same_client(door: Door) -> None:
    assert await door.login(RIGHT) is LoginKind.OK
    await door.guess(15, "name{}")
    assert await door.login(Credentials("crm", "another password")) is LoginKind.LOCKED
    assert await door.login(RIGHT) is LoginKind.OK


async def test_guesses_at_a_regular_from_its_network_are_bounded_for_the_network(door: Door) -> None:
    door.authenticator.configure(AuthSettings(credentials=door.file, max_network_failures=20))
    assert await door.login(RIGHT) is LoginKind.OK
    assert await door.guess(25, "app", "192.0.2.1{:02}") == [LoginKind.WRONG] * 20 + [LoginKind.LOCKED] * 5


async def test_a_delay_ends_at_once_when_the_client_leaves(door: Door) -> None:
    waiting = asyncio.Event()

    async def forever(_seconds: float) -> None:
        waiting.set()
        await asyncio.Event().wait()

    door.authenticator.sleep = forever
    task = asyncio.create_task(door.check(WRONG))
    await waiting.wait()
    assert await door.login(RIGHT) is LoginKind.OK  # and holds no thread meanwhile
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not len(door.authenticator._tasks)


async def test_too_many_at_once_is_busy_and_not_a_failure(door: Door) -> None:
    door.gate.clear()
    guesses = [Credentials("app", f"guess {number}") for number in range(auth.MAX_WAITING_PER_CLIENT)]
    tasks = [asyncio.create_task(door.check(guess)) for guess in guesses]
    while len(door.authenticator._checks._checks) < len(guesses):
        await asyncio.sleep(0)
    login = await door.check(RIGHT)
    assert (login.kind, login.detail) == (LoginKind.BROKEN, "too many passwords are waiting to be checked")
    door.gate.set()
    await asyncio.gather(*tasks)
    assert await door.login(RIGHT, "192.0.2.2") is LoginKind.OK


# ---- the log ---------------------------------------------------------------------------------


async def test_log_ins_are_told_with_names_that_are_known_and_without_secrets(door: Door) -> None:
    await door.login(RIGHT)
    await door.login(WRONG)
    await door.login(Credentials("hunter2 in the wrong field", "x" * 9))
    told = [line for line in door.log.entries if line[1].startswith("log")]
    assert [(level, event, fields.get("reason")) for level, event, fields in told] == [
        ("info", "logged-in", None),
        ("warning", "login-failed", "wrong"),
        ("warning", "login-failed", "wrong"),
    ]
    ok, wrong, unknown = (fields for _, _, fields in told)
    assert ok["user"] == wrong["user"] == "app"
    assert "user" not in unknown
    assert ok["client"] == wrong["client"] == unknown["client"]
    everything = repr(door.log.entries) + repr(vars(door.authenticator))
    for secret in ("correct horse", "battery staple", "hunter2", CLIENT):
        assert secret not in everything


async def test_one_old_password_of_a_fleet_is_one_failure(door: Door) -> None:
    """200 machines with an old password locked their network out, those with the right one too."""
    old = Credentials("app", "the old one")
    for each in range(200):
        assert await door.login(old, f"192.0.2.{each + 1}") is LoginKind.WRONG
    assert max(door.slept) == min(door.slept), "the answers come no later each time"
    assert await door.login(RIGHT, "192.0.2.250") is LoginKind.OK
    assert await door.login(Credentials("crm", "another password"), "192.0.2.251") is LoginKind.OK
    assert await door.login(old, "198.51.100.1") is LoginKind.WRONG
    for _ in range(door.settings.max_client_failures - 1):
        assert await door.login(WRONG, "198.51.100.1") is LoginKind.WRONG
    assert await door.login(WRONG, "198.51.100.1") is LoginKind.LOCKED, "other guesses count, each of them"


async def test_one_password_at_many_accounts_is_many_failures(door: Door) -> None:
    for each in range(door.settings.max_client_failures):
        assert await door.login(Credentials(f"user{each}", "spring2026")) is LoginKind.WRONG
    assert await door.login(RIGHT) is LoginKind.LOCKED


async def test_workers_share_failures(door: Door, tmp_path: Path) -> None:
    """With N workers a client had N times as many guesses."""
    (tmp_path / "other").mkdir()
    other = Door(tmp_path / "other")
    for _ in range(door.settings.max_client_failures):
        assert await door.login(WRONG) is LoginKind.WRONG
        other.authenticator.failed_elsewhere(door.shared.pop())
    assert door.shared == other.shared == []
    assert await other.login(RIGHT) is LoginKind.LOCKED
    assert await other.login(RIGHT, "198.51.100.1") is LoginKind.OK
    assert "battery" not in "".join(door.shared)


# How failed log-ins add up per key


WINDOW = 900.0


@pytest.fixture
def table() -> FailedAttempts:
    return FailedAttempts(max_failures=10, window=WINDOW)


def test_a_lock_ends_when_the_oldest_failure_is_forgotten(table: FailedAttempts) -> None:
    for at in range(10):
        table.failed("a", float(at))
    assert table.locked("a", WINDOW - 0.001)
    assert not table.locked("a", WINDOW)
    assert not table.locked("b", 9.0)
    table.failed("a", WINDOW)
    assert table.locked("a", WINDOW + 0.5)


def test_after_a_quiet_time_the_delay_begins_again(table: FailedAttempts) -> None:
    table.failed("a", 0.0)
    assert table.failed("a", 1.0) == 1.0
    assert table.failed("a", 1.0 + WINDOW) == 0.5


def test_the_table_forgets_whoever_failed_longest_ago(table: FailedAttempts) -> None:
    for _ in range(10):
        table.failed("first", 0.0)
        table.failed("second", 0.0)
    table.failed("first", 0.0)  # now the second is the older one
    for number in range(MAX_KEYS - 1):
        table.failed(str(number), 0.0)
    assert len(table._keys) == MAX_KEYS
    assert table.locked("first", 0.0)
    assert not table.locked("second", 0.0)


def test_failures_of_one_client_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "MAX_COUNTED", 20)
    table = FailedAttempts(max_failures=1_000_000, window=WINDOW)
    delays = [table.failed("a", 0.0) for _ in range(2000)]
    assert delays[-1] == 10.0
    assert table.locked("a", 0.0)  # the bound is the lock, too
    assert len(table._keys["a"].guesses) == 20


# Remembered passwords, and the lanes before the threads


SECRET = bytes(range(32))

QUEUES = 2


@pytest.fixture
def remembered() -> RememberedPasswords:
    return RememberedPasswords(SECRET, ManualClock())


def test_user_password_and_hash_are_in_the_key_and_kept_apart(remembered: RememberedPasswords) -> None:
    triples = [("a", "bc", "d"), ("ab", "c", "d"), ("a", "b", "cd"), ("a", "bc", "e"), ("A", "bc", "d")]
    assert len({remembered.key(*triple) for triple in triples}) == len(triples)
    assert remembered.key("a", "bc", "d") != RememberedPasswords(SECRET[::-1], ManualClock()).key(
        "a", "bc", "d"
    )


def test_the_memory_is_bounded_and_forgets_the_oldest(remembered: RememberedPasswords) -> None:
    keys = [remembered.key(str(number), "pw", "hash") for number in range(MIN_REMEMBERED + 1)]
    for key in keys:
        remembered.add(key)
    assert len(remembered.until) == MIN_REMEMBERED
    assert keys[0] not in remembered
    assert keys[1] in remembered
    remembered.until.limit = MIN_REMEMBERED + 2
    for number in range(3):
        remembered.add(remembered.key(f"another {number}", "pw", "hash"))
    assert len(remembered.until) == MIN_REMEMBERED + 2


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        RememberedPasswords(b"short", ManualClock())


class Gate:
    """A hash function that waits to be let through, and counts."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun = threading.Semaphore(0)
        self.calls = 0

    def matches(self, stored_hash: str, password: str) -> bool:
        self.calls += 1
        self.begun.release()
        assert self.open.wait(10)
        return stored_hash == password


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


@pytest.fixture
async def checks(gate: Gate) -> AsyncIterator[PasswordChecks]:
    checks = PasswordChecks(gate.matches)
    yield checks
    gate.open.set()
    checks.close()


async def check(checks: PasswordChecks, key: bytes, password: str = "pw", **more: Any) -> bool:
    given = {"regular": False, "rank": lambda: 0, **more}
    entered = checks.enter(auth.PasswordCheck(key, "pw", password, **given))
    try:
        return await asyncio.shield(entered.done)
    except asyncio.CancelledError:
        checks.leave(entered)
        raise


async def started(checks: PasswordChecks, keys: range, **more: Any) -> list[asyncio.Task[bool]]:
    tasks = [
        asyncio.create_task(check(checks, str(key).encode(), **{"client": f"client {key}", **more}))
        for key in keys
    ]
    await asyncio.sleep(0)
    return tasks


async def test_more_than_the_queue_holds_is_told_busy(gate: Gate, checks: PasswordChecks) -> None:
    tasks = await started(checks, range(1 + auth.MAX_WAITING))
    with pytest.raises(auth.ChecksBusyError):
        await check(checks, b"one more", client="another")
    gate.open.set()
    assert all(await asyncio.gather(*tasks))
    assert await check(checks, b"one more", client="another")
    assert not await check(checks, b"wrong", "other", client="another")


async def test_equal_checks_at_one_time_are_one_hash(gate: Gate, checks: PasswordChecks) -> None:
    tasks = [*await started(checks, range(1)), *await started(checks, range(1))]
    gate.open.set()
    assert await asyncio.gather(*tasks) == [True, True]
    assert gate.calls == 1


async def test_who_leaves_does_not_take_the_answer_from_others(gate: Gate, checks: PasswordChecks) -> None:
    [leaving] = await started(checks, range(1))
    [staying] = await started(checks, range(1))
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    gate.open.set()
    assert await staying


async def test_closing_answers_what_waits_without_hashing_it(gate: Gate, checks: PasswordChecks) -> None:
    tasks = await started(checks, range(5))
    tasks += await started(checks, range(5, 10), regular=True)
    for _ in range(QUEUES):
        assert await asyncio.to_thread(gate.begun.acquire, timeout=10)
    checks.close()
    gate.open.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [answers.pop(5), answers.pop(0)] == [True, True]
    assert all(isinstance(answer, auth.ClosedError) for answer in answers)
    assert gate.calls == QUEUES
    with pytest.raises(auth.ClosedError):
        await check(checks, b"late", client="a")


async def test_regulars_wait_for_no_strangers_who_have_a_lane(gate: Gate, checks: PasswordChecks) -> None:
    strangers = await started(checks, range(1 + auth.MAX_WAITING))
    assert await asyncio.to_thread(gate.begun.acquire, timeout=10)
    [regular] = await started(checks, range(100, 101), regular=True)
    assert await asyncio.to_thread(gate.begun.acquire, timeout=10)
    assert gate.calls == QUEUES  # nothing else of 66
    gate.open.set()
    assert await regular
    await asyncio.gather(*strangers)


async def test_with_cores_regulars_have_all_of_them_and_strangers_all_but_one(gate: Gate) -> None:
    checks = PasswordChecks(gate.matches, cores=3)
    strangers = await started(checks, range(10))
    regulars = await started(checks, range(100, 110), regular=True)
    for _ in range(2 + 3):
        assert await asyncio.to_thread(gate.begun.acquire, timeout=10)
    assert not await asyncio.to_thread(gate.begun.acquire, timeout=0.2)
    gate.open.set()
    assert all(await asyncio.gather(*strangers, *regulars))
    checks.close()


async def test_strangers_come_in_the_order_of_their_failures(gate: Gate, checks: PasswordChecks) -> None:
    order: list[str] = []

    def note(name: str) -> Callable[[asyncio.Task[bool]], None]:
        return lambda _: order.append(name)

    await started(checks, range(1))
    for key, (name, rank) in enumerate({"third": 7, "second": 2, "first": 0}.items(), 1):
        [task] = await started(checks, range(key, key + 1), rank=lambda rank=rank: rank)
        task.add_done_callback(note(name))
    [last] = await started(checks, range(9, 10), rank=lambda: 7)
    gate.open.set()
    await last
    assert order == ["first", "second", "third"]


async def test_without_room_the_one_with_most_failures_goes(gate: Gate, checks: PasswordChecks) -> None:
    guessing = await started(checks, range(1 + auth.MAX_WAITING), rank=lambda: 3)
    [fresh] = await started(checks, range(100, 101))
    with pytest.raises(auth.ChecksBusyError):
        await check(checks, b"guess", client="another", rank=lambda: 3)
    gate.open.set()
    assert await fresh
    answers = await asyncio.gather(*guessing, return_exceptions=True)
    assert [number for number, answer in enumerate(answers) if isinstance(answer, auth.ChecksBusyError)] == [
        auth.MAX_WAITING
    ]
    assert checks._checks == {}


async def test_what_nobody_waits_for_or_is_locked_is_not_hashed(gate: Gate, checks: PasswordChecks) -> None:
    lock: list[int | None] = [0]
    first, left, *locked = await started(checks, range(4), rank=lambda: lock[0])
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    lock[0] = None
    gate.open.set()
    assert await first
    for answer in await asyncio.gather(*locked, return_exceptions=True):
        assert isinstance(answer, auth.GoneError)
    assert gate.calls == 1
    assert checks._checks == {}


async def test_a_check_for_a_regular_too_moves_to_their_lane(gate: Gate, checks: PasswordChecks) -> None:
    strangers = await started(checks, range(3))
    [regular] = await started(checks, range(2, 3), regular=True)
    for _ in range(QUEUES):
        assert await asyncio.to_thread(gate.begun.acquire, timeout=10)
    gate.open.set()
    assert await regular
    assert all(await asyncio.gather(*strangers))
    assert gate.calls == 3
