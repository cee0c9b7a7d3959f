"""A spool on a small file system that fills up: 452, nothing acknowledged is lost, and it recovers."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.crew import relay_of, status
from tests.support.ports import free_port
from tests.support.process import RelayProcess
from tests.support.regulars import Regulars
from tests.support.sink import Sink
from tests.support.submit import Submitter, tokens

MB = 1024 * 1024
SIZE = 160 * MB
# LevelDB may need a third of this for a moment when it moves a table from one level to the next.
GUARD = "64 MB"
LARGE = 1_000_000
NOT_NOW = (b"452 4.3.1", b"451 4.3.0")


@contextlib.contextmanager
def mounted(place: Path, size: int) -> Iterator[Path]:
    """A tmpfs of its own; needs the right to mount, which CI and a developer's container have."""
    place.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def size() -> int:
    """Of the disk, in octets."""
    return SIZE


@pytest.fixture
def small_disk(tmp_path: Path, size: int) -> Iterator[Path]:
    with mounted(tmp_path / "disk", size) as place:
        yield place


@pytest.fixture
def sink_port() -> int:
    """Where nobody takes mail until a test's sink does."""
    return free_port()


def relay_on(
    tmp_path: Path, disk: Path, sink_port: int, guard: str | int, *, workers: int = 1
) -> RelayProcess:
    return RelayProcess(
        tmp_path / "relay",
        next_hop=f"127.0.0.1:{sink_port}",
        top={"workers": workers},
        spool={"path": str(disk / "spool"), "min_free_space": guard, "write_buffer": "1 MB"},
        tables={"retry": {"schedule": ["1s"], "jitter": 0, "suspend_min": "1s", "suspend_max": "2s"}},
    )


def occupy(neighbour: Path) -> None:
    """Fill the disk to its last block, like somebody's `dd`."""
    with neighbour.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(MB))
    with neighbour.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def held(ballast: Path) -> int:
    """Octets of the disk."""
    return ballast.stat().st_blocks * 512 if ballast.exists() else 0


def ready(relay: RelayProcess, status: int) -> None:
    relay.wait_for(lambda: relay.http("/readyz")[0] == status, what=f"/readyz {status}", timeout=30)


def accepts_again(relay: RelayProcess, sink: Sink) -> None:
    """The relay is ready and passes mail on."""
    ready(relay, 200)
    late = Submitter(relay.smtp_port, prefix="late")
    late.send(1, 3)
    assert len(late.acknowledged) == 3, late.replies
    relay.wait_until_empty()
    assert late.acknowledged <= tokens(sink.messages).keys()


@contextlib.contextmanager
def drained(relay: RelayProcess, sink_port: int, client: Submitter, *, seconds: float = 30) -> Iterator[Sink]:
    """All that was acknowledged comes to a sink, which then takes more."""
    with Sink(port=sink_port) as sink:
        sink.until(len(client.acknowledged), timeout=seconds)
        relay.wait_until_empty(timeout=60)
        assert client.acknowledged <= tokens(sink.messages).keys()
        yield sink


def check_refusals(client: Submitter) -> None:
    """Some mail was taken, some was not, and nobody was told never to come back."""
    assert client.acknowledged
    assert [reply for reply in client.replies if reply.startswith(NOT_NOW)], client.replies
    assert not [reply for reply in client.replies if reply.startswith(b"5")], client.replies


@pytest.mark.parametrize(
    ("size", "guard"),
    [
        (SIZE, GUARD),
        # Often so little that LevelDB has to be given the room that is kept back.
        (120 * MB, GUARD),
        # Less than LevelDB needs: the guard is what it needs.
        (60 * MB, "8 MB"),
    ],
)
def test_queue_that_grows_to_the_guard_is_refused_more_and_drains(
    tmp_path: Path, small_disk: Path, sink_port: int, guard: str
) -> None:
    with relay_on(tmp_path, small_disk, sink_port, guard) as relay:
        client = Submitter(relay.smtp_port, prefix="fill", size=LARGE)
        client.send(4, 200)
        check_refusals(client)
        ready(relay, 503)
        with drained(relay, sink_port, client, seconds=120) as sink:
            accepts_again(relay, sink)


def test_disk_that_a_neighbour_filled_is_drained(tmp_path: Path, small_disk: Path, sink_port: int) -> None:
    neighbour = small_disk / "neighbour"
    with relay_on(tmp_path, small_disk, sink_port, GUARD) as relay:
        client = Submitter(relay.smtp_port, prefix="queued", size=LARGE)
        client.send(2, 12)
        assert len(client.acknowledged) == 12
        ballast = small_disk / "spool" / "ballast"
        assert held(ballast) == 32 * MB
        occupy(neighbour)
        client.send(2, 6)
        check_refusals(client)
        with drained(relay, sink_port, client) as sink:
            assert held(ballast) <= 8 * MB, "a full disk was drained without the room kept back for it"
            assert relay.http("/readyz")[0] == 503
            neighbour.unlink()
            accepts_again(relay, sink)
            relay.wait_for(lambda: held(ballast) == 32 * MB, what="all of the room")


@pytest.mark.parametrize(("workers", "guard"), [(1, GUARD), (2, "32 MB")])
def test_relay_starts_and_drains_on_a_full_disk(
    tmp_path: Path, small_disk: Path, sink_port: int, workers: int, guard: str
) -> None:
    """LevelDB has to write before it opens a spool with anything in its log."""
    with relay_on(tmp_path, small_disk, sink_port, guard, workers=workers) as relay:
        client = Submitter(relay.smtp_port, prefix="queued", size=LARGE)
        client.send(2, 5)
        relay.kill()
        occupy(small_disk / "neighbour")
        relay.start(statuses=(200, 503))
        with drained(relay, sink_port, client):
            pass


def test_what_a_compaction_that_found_no_room_left_does_not_keep_the_spool_shut(
    tmp_path: Path, small_disk: Path, sink_port: int
) -> None:
    """LevelDB removes such tables when it has opened the spool, and has no room left to open it."""
    with relay_on(tmp_path, small_disk, sink_port, 0) as relay:
        client = Submitter(relay.smtp_port, prefix="queued", size=LARGE)
        client.send(2, 5)
        relay.kill()
        occupy(small_disk / "spool" / "999999.ldb")
        relay.start()
        with drained(relay, sink_port, client):
            pass


def test_failed_write_without_a_guard_loses_nothing(tmp_path: Path, small_disk: Path, sink_port: int) -> None:
    neighbour = small_disk / "neighbour"
    neighbour.write_bytes(bytes(80 * MB))
    with relay_on(tmp_path, small_disk, sink_port, 0) as relay:
        client = Submitter(relay.smtp_port, prefix="fill", size=LARGE)
        client.send(4, 200)
        check_refusals(client)
        assert relay.http("/readyz")[0] == 503
        neighbour.unlink()
        ready(relay, 200)
        with drained(relay, sink_port, client) as sink:
            accepts_again(relay, sink)


def test_a_worker_whose_disk_is_full_is_named_and_the_other_goes_on(tmp_path: Path, sink: Sink) -> None:
    spool = {"min_free_space": "16 MB", "write_buffer": "1 MB"}
    with (
        mounted(tmp_path / "spool" / "01", 48 * MB) as disk,
        relay_of(tmp_path, sink.port, worker_timeout="30s", spool=spool) as relay,
    ):
        clients = Regulars(relay.smtp_port, pause=0.02)
        with clients.at_work(4):
            occupy(disk / "neighbour")
            ready(relay, 503)
            assert relay.http("/readyz")[1].count("worker 1: insufficient disk space") == 1
            named = {"worker 1: insufficient disk space"}
            spoken = status(relay).problems
            assert {each for each in spoken if "are free on the disk" not in each} == named
            assert all(each.startswith("worker 1: ") for each in spoken)
            usable = {each: relay.metric("zonerelay_store_usable", worker=each) for each in "01"}
            assert usable == {"0": 1, "1": 0}
            before = len(relay.events("accepted"))
            relay.wait_for(lambda: sum([*clients.complaints.values()]) > 9, what="452")
            relay.wait_for(lambda: len(relay.events("accepted")) > before + 20, what="mail for the other")
            assert {event["id"][-2:] for event in relay.events("accepted")[before:]} == {"00"}
            (disk / "neighbour").unlink()
            ready(relay, 200)
            back = len(relay.events("accepted"))
            relay.wait_for(
                lambda: {"00", "01"} == {event["id"][-2:] for event in relay.events("accepted")[back:]},
                what="mail for both",
            )
        relay.wait_until_empty()
        assert clients.acknowledged <= tokens(sink.messages).keys()
        assert all("452 4.3.1" in text for text in clients.complaints), clients.complaints
        assert relay.terminate() == 0
