"""Workers as their supervisor sees them: lives, reloads, and figures and answers made one."""

from functools import partial
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fake_relay import status_of
from zonerelay.config.load import load_text
from zonerelay.config.settings import Backend, ListenerSettings, Settings, SpoolSettings, ZoneSettings
from zonerelay.message.dkim import keys
from zonerelay.message.dkim.keys import PrivateKey, load_private_key, new_private_key
from zonerelay.model.envelope import Origin
from zonerelay.operations import answers
from zonerelay.operations.answers import SummaryRow
from zonerelay.operations.catalogue import CHANGED
from zonerelay.store.spool_paths import remove_spool, spool_of, spools_beyond
from zonerelay.supervisor.merge import merging
from zonerelay.supervisor.merge.merging import merge_changed, merge_status, merged
from zonerelay.supervisor.reload import plan
from zonerelay.supervisor.workers import restart_policy
from zonerelay.supervisor.workers.child import ending
from zonerelay.supervisor.workers.restart_policy import FIRST_PAUSE, STEADY, WELL_AFTER, Action, RestartPolicy
from zonerelay.telemetry.metrics import instruments
from zonerelay.telemetry.metrics.families import Family
from zonerelay.telemetry.metrics.instruments import MetricTotals, exposition
from zonerelay.telemetry.metrics.metrics import Metrics
from zonerelay.worker.tables import build_tables

TIMEOUTS = restart_policy.WorkerTimeouts(start=600.0, silence=20.0, stop=40.0)
STABLE = 50.0
"""A time at which every process of these tests has run for long."""


def running(now: float = 0.0) -> RestartPolicy:
    policy = RestartPolicy(TIMEOUTS, now)
    assert policy.due(now) is Action.START
    policy.started(now)
    policy.ready(now)
    return policy


def test_a_worker_that_dies_again_and_again_is_started_later_and_later() -> None:
    policy, now, waits = running(), 0.0, []
    for _ in range(9):
        policy.ended(now)
        waits.append(policy.next_start - now)
        assert policy.due(policy.next_start - 0.01) is None
        now = policy.next_start
        assert policy.due(now) is Action.START
        policy.started(now)
        policy.ready(now)
    assert waits[:4] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE, 8 * FIRST_PAUSE]
    assert waits[-1] == restart_policy.LONGEST_PAUSE
    policy.ended(now + WELL_AFTER + 1)
    assert policy.next_start - now - WELL_AFTER - 1 == FIRST_PAUSE, "it had been well"


def test_silence_is_a_hang_term_comes_first_and_then_kill() -> None:
    policy = running()
    policy.heard(10.0)
    assert policy.due(29.0) is None
    assert policy.due(31.0) is Action.TERMINATE
    assert policy.phase is restart_policy.WorkerPhase.HUNG
    assert policy.due(31.0 + restart_policy.HUNG_GRACE) is None
    assert policy.due(32.0 + restart_policy.HUNG_GRACE) is Action.KILL
    policy.ended(91.0)
    assert policy.due(91.0) is None
    assert policy.due(91.0 + FIRST_PAUSE) is Action.START
    assert policy.deaths == 1


def test_a_supervisor_that_was_held_up_itself_takes_nobodys_silence_for_a_hang() -> None:
    policy = running()
    assert policy.due(4000.0, late=True) is None
    assert policy.due(4019.0) is None
    assert policy.due(4021.0) is Action.TERMINATE


def test_who_does_not_stop_in_time_is_killed_and_who_was_asked_comes_back_at_once() -> None:
    policy = running()
    assert policy.restart(5.0) is Action.TERMINATE
    assert policy.due(44.0) is None
    assert policy.due(46.0) is Action.KILL
    policy.ended(46.0)
    assert policy.due(46.0) is Action.START
    assert policy.deaths == 0


def test_a_worker_that_never_becomes_ready_is_killed() -> None:
    policy = RestartPolicy(TIMEOUTS, 0.0)
    policy.started(0.0)
    assert policy.due(599.0) is None
    assert policy.due(601.0) is Action.KILL


@pytest.mark.parametrize("phase", ["down", "starting", "running"])
def test_one_that_is_stopped_is_never_started_again(phase: str) -> None:
    policy = RestartPolicy(TIMEOUTS, 0.0)
    if phase != "down":
        policy.started(0.0)
    if phase == "running":
        policy.ready(0.0)
    policy.stop(1.0)
    if phase != "down":
        policy.ended(2.0)
    assert policy.phase is restart_policy.WorkerPhase.OVER
    assert policy.due(1000.0) is None


@settings(max_examples=200)
@given(
    st.lists(st.sampled_from(["wait", "start", "ready", "heard", "end", "replace", "stopping"]), max_size=40)
)
def test_there_is_never_a_second_start_before_an_end(steps: list[str]) -> None:
    policy, now, alive = RestartPolicy(TIMEOUTS, 0.0), 0.0, False
    for step in steps:
        now += 7.0
        act = policy.due(now)
        assert not (act is Action.START and alive)
        if act is Action.START:
            alive = True
            policy.started(now)
        elif step == "end" and alive:
            alive = False
            policy.ended(now)
        elif step == "replace":
            assert policy.restart(now) in ((Action.TERMINATE, None) if alive else (None,))
        elif step in ("ready", "heard", "stopping") and alive:
            getattr(policy, step)(now)
    assert restart_policy.pause(policy.deaths) <= restart_policy.LONGEST_PAUSE


def come_back(policy: RestartPolicy, now: float = 1.0) -> None:
    policy.restart(now)
    policy.ended(now)
    policy.started(now)
    policy.ready(now)


class Roll:
    """A rolling restart whose steps have the workers and the time that a test gives them."""

    failed: int | None = None
    done = False

    def __init__(
        self, lives: dict[int, RestartPolicy], every: dict[int, RestartPolicy] | None = None
    ) -> None:
        self._lives, self._now = every or lives, 0.0
        self._steps = restart_policy.rolling_restart(lives, lambda: self._lives, lambda: self._now)

    def step(self, now: float) -> int | None:
        self._now = now
        try:
            return next(self._steps)
        except StopIteration as end:
            self.failed, self.done = end.value, True
            return None


def test_a_roll_replaces_one_at_a_time_while_another_takes_the_clients() -> None:
    lives = {0: running(), 1: running(), 2: running()}
    roll = Roll(lives)
    order = []
    while (worker := roll.step(STABLE)) is not None:
        order.append(worker)
        lives[worker].restart(1.0)
        assert roll.step(STABLE) is None, "it has not ended yet"
        lives[worker].ended(2.0)
        lives[worker].started(2.0)
        assert roll.step(STABLE) is None, "it is not ready yet"
        lives[worker].ready(3.0)
    assert order == [0, 1, 2]
    assert roll.done
    assert roll.failed is None


def test_a_roll_waits_while_nobody_else_takes_clients_and_goes_on_with_one_worker_alone() -> None:
    lives = {0: running(), 1: running()}
    roll = Roll(lives)
    lives[1].ended(1.0)
    assert roll.step(STABLE) == 1, "it is down anyway"
    assert roll.step(STABLE) is None
    come_back(lives[1])
    assert roll.step(STABLE) == 0
    alone = {0: running()}
    assert Roll(alone).step(STABLE) == 0


def test_a_roll_ends_when_the_new_process_does_not_come_up() -> None:
    lives = {0: running(), 1: running()}
    roll = Roll(lives)
    assert roll.step(STABLE) == 0
    come_back(lives[0])
    assert roll.step(STABLE) == 1
    lives[1].restart(2.0)
    lives[1].ended(2.0)
    lives[1].started(2.0)
    lives[1].ended(3.0)
    assert roll.step(STABLE) is None
    assert roll.failed == 1
    assert roll.done


def test_one_that_dies_with_its_first_clients_has_not_come_up() -> None:
    lives = {0: running(), 1: running()}
    roll = Roll(lives)
    assert roll.step(1.0) == 0
    come_back(lives[0], 1.0)
    assert roll.step(1.0 + STEADY - 0.01) is None, "the other one is not touched yet"
    lives[0].ended(1.5)
    assert roll.step(1.5) is None
    assert roll.failed == 0


def test_one_that_came_up_and_dies_while_the_next_is_replaced_stops_the_roll() -> None:
    lives = {0: running(), 1: running(), 2: running()}
    roll = Roll(lives)
    assert roll.step(STABLE) == 0
    come_back(lives[0])
    assert roll.step(STABLE) == 1
    lives[1].restart(STABLE)
    lives[0].ended(STABLE + STEADY)
    assert roll.step(STABLE + STEADY) is None
    assert (roll.failed, roll.done) == (0, True)


def test_one_that_was_in_trouble_before_does_not_stop_the_roll() -> None:
    lives = {0: running(), 1: running(), 2: running()}
    lives[1].ended(1.0)
    roll = Roll(lives)
    assert roll.step(STABLE) == 0
    come_back(lives[0])
    assert roll.step(STABLE) == 1
    lives[1].started(2.0)
    assert roll.step(STABLE) is None
    lives[1].ended(3.0)
    assert roll.step(STABLE) == 2
    come_back(lives[2])
    assert roll.step(STABLE) is None
    assert roll.done
    assert roll.failed is None


def test_who_was_in_trouble_before_may_die_again_while_others_are_replaced() -> None:
    lives = {0: running(), 1: running()}
    lives[0].ended(1.0)
    roll = Roll(lives)
    assert roll.step(STABLE) == 0
    lives[0].started(2.0)
    lives[0].ready(2.0)
    assert roll.step(STABLE) == 1
    lives[0].ended(STABLE)
    come_back(lives[1], STABLE)
    assert roll.step(2 * STABLE) is None
    assert (roll.failed, roll.done) == (None, True)


def test_who_is_well_runs_and_has_not_just_died() -> None:
    policy = RestartPolicy(TIMEOUTS, 0.0)
    assert not policy.is_well(0.0)
    policy.started(0.0)
    policy.ready(0.0)
    assert policy.is_well(0.0)
    policy.ended(1.0)
    policy.started(2.0)
    policy.ready(2.0)
    assert not policy.is_well(2.0 + WELL_AFTER)
    assert policy.is_well(2.1 + WELL_AFTER)


def test_nobody_waits_for_workers_that_die_at_each_start() -> None:
    lives = {0: running(), 1: running()}
    for death in range(1, restart_policy.HOPELESS + 1):
        lives[1].ended(float(death))
        lives[1].started(float(death))
    roll = Roll({0: lives[0]}, lives)
    assert roll.step(STABLE) == 0


@pytest.mark.parametrize(
    ("status", "because", "words", "expected"),
    [
        (-9, "", "", "killed by SIGKILL"),
        (-9, "no sign of policy for 20 s", "", "no sign of policy for 20 s; killed by SIGKILL"),
        (1, "", "the spool is locked", "exited with status 1: the spool is locked"),
        (-99, "", "", "killed by signal 99"),
    ],
)
def test_an_end_is_told_in_words(status: int, because: str, words: str, expected: str) -> None:
    assert ending(status, killed_because=because, last_words=words) == expected


# A reload makes the tables of what has changed alone


TEXT = """
[[listener]]
address = "127.0.0.1:0"
allow_networks = ["192.0.2.0/24"]

[[zone]]
name = "default"

[[zone]]
name = "bulk"

[[route]]
zone = "bulk"
recipient_domain = ["a.example"]

[[access]]
action = "refuse"
sender = ["b@a.example"]

[[destination]]
mx = ["mx.a.example"]
max_connections = 2
"""


def key(file: Path, domain: str) -> str:
    file.write_text(new_private_key("ed25519-sha256"))
    file.chmod(0o600)
    return f'[[dkim]]\ndomain = "{domain}"\nselector = "s"\nkey_file = "{file}"\n'


def test_what_has_not_changed_stays_the_object_that_it_was() -> None:
    old = build_tables(load_text(TEXT), 0.0, {})
    same = build_tables(load_text(TEXT), 0.0, {}, old)
    assert same.settings.zone is old.settings.zone
    assert same.settings.listener[0] is old.settings.listener[0]
    assert (same.zones, same.rules, same.destinations) == (old.zones, old.rules, old.destinations)


def test_what_has_changed_is_made_anew() -> None:
    old = build_tables(load_text(TEXT), 0.0, {})
    changed = TEXT.replace("b@a", "c@a").replace('name = "bulk"', 'name = "bulk"\nmax_connections = 3')
    new = build_tables(load_text(changed), 0.0, {}, old)
    assert new.settings.zone[0] is old.settings.zone[0]
    assert new.settings.zone[1].max_connections == 3
    assert new.zones.get("bulk").max_connections == 3
    assert new.destinations is old.destinations
    assert new.rules.access is not None
    assert new.rules.access.decide(Origin(), "c@a.example", "d@e.example") is not None
    assert new.rules.access.decide(Origin(), "b@a.example", "d@e.example") is None


def test_keys_that_have_not_changed_are_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[bytes] = []

    def load(pem: bytes) -> PrivateKey:
        tried.append(pem)
        return load_private_key(pem)

    monkeypatch.setattr(keys, "load_private_key", load)
    text = TEXT + key(tmp_path / "a", "a.example") + key(tmp_path / "b", "b.example")
    old = build_tables(load_text(text), 0.0, {})
    assert len(tried) == 2
    (tmp_path / "b").write_text(new_private_key("ed25519-sha256"))
    new = build_tables(load_text(text), 0.0, {}, old)
    assert len(tried) == 3
    assert old.dkim_keys is not None
    assert new.dkim_keys is not None
    before, after = old.dkim_keys.entries, new.dkim_keys.entries
    assert before[0].key is after[0].key
    assert before[1].key.public != after[1].key.public


# Many workers' figures and answers made one: counters never go backwards, shared queues count once


def counted(value: float) -> Family:
    return Family("zonerelay_x", "counter", "X.", (("zonerelay_x_total", (), value),))


def total(accounts: MetricTotals) -> float:
    return sum(value for family in accounts.families() for _, _, value in family.samples)


def test_summaries_are_added_and_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "MAX_KEYS", 2)

    def part(every: int, **rows: tuple[int, int]) -> answers.Summary:
        found = (SummaryRow(key=key, total=sum(ages), ages=ages) for key, ages in rows.items())
        return answers.Summary(by="domain", minutes=(5,), rows=tuple(found), every=every)

    other = SummaryRow(key="other", total=1, ages=(0, 1))
    parts = [part(1, a=(1, 2), b=(5, 0)), msgspec.structs.replace(part(3, a=(3, 3), c=(0, 3)), other=other)]
    whole = merging.merge_summaries(parts)
    assert [(row.key, row.total, row.ages) for row in whole.rows] == [("a", 9, (4, 5)), ("b", 5, (5, 0))]
    assert whole.other == SummaryRow(key="other", total=4, ages=(0, 4))
    assert whole.every == 3


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["count", "scrape", "die"])), max_size=60))
def test_a_counter_never_goes_backwards_whoever_dies(steps: list[tuple[int, str]]) -> None:
    accounts, numbers, lives, before = MetricTotals(), [0, 0, 0], [0, 0, 0], 0.0
    really = 0
    for worker, step in steps:
        if step == "count":
            numbers[worker] += 3
            really += 3
        elif step == "scrape":
            accounts.take(worker, lives[worker], (counted(numbers[worker]),))
        else:
            accounts.take(worker, lives[worker], (counted(numbers[worker]),))
            accounts.bury(worker, lives[worker])
            accounts.bury(worker, lives[worker])  # its last words, and its end
            for late in (lives[worker], lives[worker] - 1):
                accounts.take(worker, late, (counted(1000),))  # too late: it is not heard
            lives[worker] += 1
            numbers[worker] = 0
        assert before <= total(accounts) <= really
        before = total(accounts)


def test_another_worker_with_the_number_of_one_that_was_forgotten_is_counted() -> None:
    accounts = MetricTotals()
    for life in (1, 2, 3):
        accounts.take(1, life, (counted(10),))
    accounts.forget(1)
    assert total(accounts) == 30
    accounts.take(1, 1, (counted(5),))
    assert total(accounts) == 35


def test_counters_and_histograms_add_up_ages_do_not_and_the_text_is_prometheus() -> None:
    accounts = MetricTotals()
    for worker, oldest in ((0, 30.0), (1, 90.0)):
        metrics = Metrics()
        metrics.accepted(1000, 2)
        metrics.settled("default", "delivered", 0.3)
        queue = instruments.ZoneQueue("default", ready=5, active=1, deferred=2, held=0, oldest=oldest)
        metrics.read(partial(instruments.queue_figures, [queue], is_counted=True))
        metrics.read({"zonerelay_spool_free_bytes": {str(worker): 5000}}.copy)
        metrics.read(partial(instruments.reload_figures, 1000.0 + worker, worker == 0))
        metrics.last_delivered.value = 100 + worker
        accounts.take(worker, 1, metrics.families())
    text = exposition(accounts.families()).decode()
    for line in (
        "zonerelay_messages_accepted_total 2.0",
        'zonerelay_delivery_seconds_bucket{le="0.5"} 2.0',
        'zonerelay_queue_deliveries{state="ready",zone="default"} 10.0',
        'zonerelay_queue_oldest_seconds{zone="default"} 90.0',
        'zonerelay_spool_free_bytes{worker="1"} 5000.0',
        "zonerelay_config_last_reload_success_timestamp_seconds 1000.0",
        "zonerelay_config_last_reload_successful 0.0",
        "zonerelay_last_delivered_timestamp_seconds 101.0",
    ):
        assert line in text
    shared = exposition(accounts.families(shared=True)).decode()
    assert 'zonerelay_queue_deliveries{state="ready",zone="default"} 5.0' in shared
    assert 'zonerelay_queue_deliveries{state="active",zone="default"} 2.0' in shared
    accounts.bury(1, 1)
    text = exposition(accounts.families()).decode()
    assert 'zonerelay_queue_deliveries{state="ready",zone="default"} 10.0' in text, "its mail is still there"
    assert "zonerelay_messages_accepted_total 2.0" in text
    accounts.forget(1)
    assert 'state="ready",zone="default"} 5.0' in exposition(accounts.families()).decode()


def families_of(*, ready: int, is_counted: bool) -> tuple[Family, ...]:
    metrics = Metrics()
    queue = instruments.ZoneQueue("default", ready=ready, active=0, deferred=0, held=0, oldest=9.0 * ready)
    metrics.read(partial(instruments.queue_figures, [queue], is_counted=is_counted))
    return metrics.families()


def test_a_queue_that_is_being_counted_again_is_the_one_before_it() -> None:
    accounts = MetricTotals()
    ready = 'zonerelay_queue_deliveries{state="ready",zone="default"}'
    for life, is_counted, said, shown in (
        (1, False, 0, None),
        (1, True, 700, 700),
        (2, False, 3, 700),
        (3, False, 1, 700),
        (3, True, 705, 705),
        (4, True, 0, 0),
    ):
        accounts.take(0, life, families_of(ready=said, is_counted=is_counted))
        text = exposition(accounts.families()).decode()
        found = [line for line in text.splitlines() if line.startswith(ready)]
        assert found == ([] if shown is None else [f"{ready} {shown:.1f}"]), (life, is_counted)
        assert f"zonerelay_queue_counting {0 if is_counted else 1:.1f}" in text


def status(
    *, ready: int = 0, active: int = 0, problems: tuple[str, ...] = (), until: float | None = None
) -> answers.RelayStatus:
    zone = answers.ZoneStatus(
        name="default", ready=ready, active=active, deferred=3, held=1, oldest_seconds=ready
    )
    destination = answers.DestinationStatus(
        zone="default", destination="a.example", hosts="mx", active=active, waiting=2, suspended_until=until
    )
    return status_of(destination, zones=(zone,), inbound_connections=4, problems=problems)


def test_the_status_adds_up_and_a_problem_says_whose_it_is() -> None:
    own = status()
    one = status(ready=5, active=1, problems=("all",))
    parts = {0: one, 1: status(ready=7, active=2, problems=("all", "disk"), until=9.0)}
    merged = merge_status(parts, own, shared=False)
    assert merged.inbound_connections == 8
    (zone,) = merged.zones
    assert (zone.ready, zone.active, zone.deferred, zone.held, zone.oldest_seconds) == (12, 3, 6, 2, 7)
    (destination,) = merged.destinations
    assert (destination.active, destination.waiting, destination.suspended_until) == (3, 4, 9.0)
    assert merged.problems == ("all", "worker 1: disk")
    (zone,) = merge_status(parts, own, shared=True).zones
    assert zone.ready + zone.active + zone.deferred + zone.held == 13, "the queue is one"
    assert zone.active == 3
    assert merge_status({}, own, shared=False).destinations == ()


def test_minutes_of_workers_that_have_run_for_different_times_are_added_from_the_last() -> None:
    parts = {
        n: msgspec.structs.replace(status(), accepted_per_minute=some)
        for n, some in enumerate(((1, 2, 3), (10,), ()))
    }
    assert merge_status(parts, status(), shared=False).accepted_per_minute == (1, 2, 13)


def test_the_last_hour_is_counted_by_minute() -> None:
    total = iter((3, 3, 10, *range(11, 200)))
    minutes = instruments.PerMinute(lambda: next(total))
    minutes.mark()
    minutes.mark()
    assert minutes.counts() == ((3, 0, 7),)
    for _ in range(100):
        minutes.mark()
    assert minutes.counts() == ((1,) * 60,)


def test_the_status_says_once_from_where_limits_are_leased_and_who_cannot_reach_it() -> None:
    def said(*texts: str) -> str:
        parts = {n: msgspec.structs.replace(status(), limits=text) for n, text in enumerate(texts)}
        return merge_status(parts, status(), shared=False).limits

    assert said("leased from x", "leased from x") == "leased from x"
    assert said("leased from x", "gone", "leased from x") == "leased from x; worker 1: gone"
    assert said("", "") == ""
    assert said() == ""


def test_a_change_of_a_shared_queue_counts_each_delivery_once() -> None:
    def part(verb: str, matched: int, changed: int, busy: int) -> answers.ChangeResult:
        return answers.ChangeResult(action=verb, matched=matched, changed=changed, busy=busy)

    private = merged([part("drop", 5, 4, 1), part("drop", 3, 3, 0)], CHANGED)
    assert (private.matched, private.changed, private.busy) == (8, 7, 1)
    dropped = merge_changed([part("drop", 10, 8, 2), part("drop", 2, 2, 0)])
    assert (dropped.matched, dropped.changed, dropped.busy) == (10, 10, 0)
    held = merge_changed([part("hold", 10, 8, 2), part("hold", 10, 10, 0)])
    assert (held.matched, held.changed, held.busy) == (10, 10, 0)


@pytest.mark.parametrize(
    ("new", "later", "roll"),
    [
        (Settings(zone=(ZoneSettings(port=26),)), (), ()),
        (Settings(hostname="b.example"), (), ("hostname",)),
        (Settings(workers=4), (), ()),
        (Settings(listener=(ListenerSettings(max_errors=9),)), (), ()),
        (Settings(listener=(ListenerSettings(address="127.0.0.1:2526"),)), (), ("listener",)),
        (Settings(spool=SpoolSettings(backend=Backend.DISK)), ("spool",), ()),
    ],
)
def test_what_a_configuration_asks(new: Settings, later: tuple[str, ...], roll: tuple[str, ...]) -> None:
    found = plan(Settings(), new)
    assert (found.later, found.roll) == (later, roll)
    assert found.settings.spool == Settings().spool


def test_the_first_worker_has_the_spool_of_a_relay_with_one_and_the_others_lie_in_it(tmp_path: Path) -> None:
    spool = SpoolSettings(path=tmp_path / "spool", scratch_directory=tmp_path / "scratch")
    assert spool_of(spool, 0) == spool
    assert spool_of(spool, 11).path == tmp_path / "spool" / "11"
    assert spool_of(spool, 1).scratch_directory == tmp_path / "scratch" / "01"
    shared = SpoolSettings(backend=Backend.REDIS)
    assert spool_of(shared, 3) == shared


def test_spools_of_workers_that_are_no_more_are_found_and_removed(tmp_path: Path) -> None:
    spool = SpoolSettings(path=tmp_path / "spool")
    assert spools_beyond(spool, 1) == []
    for name in ("01", "02", "100", "lost", "03.removed"):
        (spool.path / name).mkdir(parents=True)
        (spool.path / name / "000001.log").touch()
    assert spools_beyond(spool, 1) == [1, 2, 100]
    assert not (spool.path / "03.removed").exists()
    assert spools_beyond(spool, 2) == [2, 100]
    remove_spool(spool, 2)
    assert sorted(each.name for each in spool.path.iterdir()) == ["01", "100", "lost"]


def test_shelves_of_workers_that_are_no_more_are_found_with_whatever_ending(tmp_path: Path) -> None:
    spool = SpoolSettings(backend=Backend.MEMORY, shelve=tmp_path / "shelf")
    for name in ("shelf", "shelf.01", "shelf.02.db", "shelf.dat"):
        (tmp_path / name).touch()
    assert spools_beyond(spool, 1) == [1, 2]
    remove_spool(spool, 2)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["shelf", "shelf.01", "shelf.dat"]
