"""How all tests run: side by side, the slow tiers first, and those marked `alone` by themselves afterwards.

`make test` starts more processes than there are cores, for tests wait more than they compute. A slow test
that begins last would keep one of them busy when the others have nothing left to do.
"""

import gc
import os
import signal
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.outbox import OutboxBed
from tests.support.ports import LOOPBACK
from tests.support.programs import use_fetched
from tests.support.sink import Sink
from tests.support.smarthost import SMARTHOST_PASSWORD, Smarthost, trusted
from tests.support.stories import dismiss, testimonies

gc.disable()  # until all tests are there, for none of them is garbage

TIERS = ("acceptance", "store", "upgrades", "integration", "dialogs", "fuzz", "unit")  # from slow to quick
MAX_PROCESSES = 12
LONG = ("acceptance", "transfer")
"""Tiers of `make proof`."""
SERVERS = ("postgres", "redis", "s3")
"""What needs these belongs to `make proof`, too."""
ENGINES = frozenset({*SERVERS, "disk", "shelve", "apart", "sqlite", "directory"})
"""What holds for every engine is tested with LevelDB and memory every day, with these by `make proof`."""
CRASHES = ("test_crash.py", "test_kill.py")
"""Every engine is killed every day."""
EVERYDAY = (
    "test_crash.py", "test_http_api.py", "test_sendmail.py", "test_start.py",
)  # fmt: skip
"""What `make test` runs of them: one kill -9 and one of each way in and out."""

# How long an example takes says more about the other processes than about the example.
settings.register_profile(
    "side by side", max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("side by side")


@pytest.hookimpl(trylast=True)  # the reporter is there
def pytest_configure(config: pytest.Config) -> None:
    use_fetched()
    # A shell ignores SIGINT for what it starts in the background, and the tests' own processes would inherit
    # that. The tests of Ctrl-C need it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "proof: takes long; `make proof` runs it, `make test` does not")
    config.addinivalue_line("markers", "alone: runs while no other test does, for it measures the machine")
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:  # a process that only runs tests has none
        config.pluginmanager.register(Failures(terminal))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Half as many again as there are cores."""
    cores = len(os.sched_getaffinity(0))
    return min(cores + max(1, cores // 2), MAX_PROCESSES)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out, unread, what has no test that is wanted: reading takes longer than those that are."""
    if not collection_path.name.startswith("test_"):
        return None
    if "not proof" in config.option.markexpr and _is_long_file(collection_path):
        return True
    if not config.option.markexpr.startswith("alone"):
        return None
    return "mark.alone" not in collection_path.read_text() or None


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _is_long(item):
            item.add_marker(pytest.mark.proof)
    items.sort(key=lambda item: _tier(item.path))


def pytest_collection_finish() -> None:
    """Keep a test's look for garbage from a look at all other tests."""
    gc.collect()  # from here on tuples of constants are nothing to the collector
    gc.freeze()
    gc.enable()


def _is_long(item: pytest.Item) -> bool:
    """Return whether a test belongs to `make proof` for the place where it is, or for the server it needs."""
    parameters = item.name.partition("[")[2].rstrip("]").split("-")
    if not {"delivery", "dialogs"}.isdisjoint(item.path.parts):  # the relay runs on uvloop
        return "asyncio" in parameters
    if not {"store", "integration"}.isdisjoint(item.path.parts):
        if any(server in item.nodeid.rpartition("/")[2].lower() for server in SERVERS):
            return True
        return item.path.name not in CRASHES and not ENGINES.isdisjoint(parameters)
    return _is_long_file(item.path)


def _is_long_file(path: Path) -> bool:
    return not set(LONG).isdisjoint(path.parts) and path.name not in EVERYDAY


def _tier(path: Path) -> int:
    """Its place among the tiers; what has none begins early."""
    return next((place for place, name in enumerate(TIERS) if name in path.parts), 0)


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[OutboxBed]:
    """An outbox of a test's own."""
    bed = OutboxBed(tmp_path)
    yield bed
    bed.drop()


@pytest.fixture
async def sink() -> AsyncIterator[Sink]:
    """A receiver that takes everything."""
    async with Sink() as sink:
        yield sink


@pytest.fixture
async def smarthost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Smarthost]:
    """One on loopback that this machine trusts, and that lets `relay` log in with `SMARTHOST_PASSWORD`."""
    tls = trusted(LOOPBACK, tmp_path, monkeypatch)
    async with Smarthost(tls=tls, users={"relay": SMARTHOST_PASSWORD}) as smarthost:
        yield smarthost


def pytest_runtest_setup() -> None:
    dismiss()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed once, on a busy machine, must not need a second time to be understood. One that
    cannot be run is skipped with its reason, and in CI it has failed.
    """
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"CI leaves nothing out: {reason}"
    if report.failed:
        report.sections += testimonies()
    return report


class Failures:
    """Says at once which test failed, and why: a run that is broken off comes to no account at its end."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = "" if crash is None else crash.message.partition("\n")[0][:200]
            self._terminal.write_line(f" {report.nodeid} ({report.when}) {reason}", red=True)
