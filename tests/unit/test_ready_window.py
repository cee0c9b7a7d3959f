"""The window over a zone's queue: races between reading the disk and what happens meanwhile."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.store.builders import NOW, delivery_for, envelope_for, message_id
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.queue_name import queue_of
from zonerelay.store.common import records
from zonerelay.store.leveldb import ready_window
from zonerelay.store.leveldb.ready_window import DiskRange, Taken, ZoneWindow


class Disk:
    """What is stored, and a window over it that reads one page of `page` rows when it asks."""

    def __init__(self, *stored: int, page: int = 100) -> None:
        self.rows: dict[DeliveryKey, Delivery] = {}
        self.busy: set[DeliveryKey] = set()
        self.window = ZoneWindow(queue_of("default"), self.busy.__contains__, empty=False)
        self.page = page
        for number in stored:
            delivery = fresh(number)
            self.rows[delivery.key] = delivery

    def commit(self, number: int) -> None:
        delivery = fresh(number)
        self.rows[delivery.key] = delivery
        self.window.add(delivery.key, delivery)

    def read(self, source: DiskRange) -> tuple[list[Delivery], bytes | None]:
        """What the reader thread sees at this moment."""
        start = self.window.start_reading(source)
        keys = sorted(key for key in self.rows if records.delivery_key(key) >= start)
        behind = [records.delivery_key(key) for key in keys[self.page :]]
        return [self.rows[key] for key in keys[: self.page]], behind[0] if behind else None

    def absorb(self, source: DiskRange, read: tuple[list[Delivery], bytes | None]) -> None:
        self.window.absorb(source, *read, NOW)

    def take(self, limit: int = 100, skip: tuple[str, ...] = ()) -> list[int]:
        """A whole claim."""
        found: Taken = {}
        while (source := self.window.take(limit, skip, NOW, found, {})) is not None:
            self.busy.update(found)
            if source is self.window.fresh_range:
                self.absorb(source, self.read(source))
            else:
                self.window.start_reading(source)
                self.window.absorb(source, [], None, NOW)
        self.busy.update(found)
        return [int(key.message_id, 16) for key in found]


def fresh(number: int) -> Delivery:
    return delivery_for(envelope_for(message_id(number), "a@example.net"), "a@example.net")


def test_commit_during_a_read_that_did_not_see_it_is_not_missed() -> None:
    disk = Disk(1, 9)
    source = disk.window.fresh_range
    read = disk.read(source)
    disk.commit(5)
    disk.absorb(source, read)
    assert disk.take() == [1, 5, 9]


def test_commit_behind_the_page_that_is_being_read_is_not_missed() -> None:
    disk = Disk(1, 2, page=2)
    source = disk.window.fresh_range
    read = disk.read(source)
    disk.commit(3)
    disk.absorb(source, read)
    assert disk.take() == [1, 2, 3]


def test_delivery_finished_during_the_read_that_saw_it_does_not_come_back() -> None:
    disk = Disk(1, 2)
    source = disk.window.fresh_range
    read = disk.read(source)
    disk.window.forget(fresh(1).key)
    del disk.rows[fresh(1).key]
    disk.absorb(source, read)
    assert disk.take() == [2]


def test_delivery_whose_commit_is_not_confirmed_yet_is_left_to_its_confirmation() -> None:
    disk = Disk(1)
    disk.busy.add(fresh(1).key)
    assert disk.take() == []
    disk.busy.clear()
    disk.window.add(fresh(1).key, fresh(1))
    assert disk.take() == [1]


def test_failed_read_is_tried_again() -> None:
    disk = Disk(1)
    source = disk.window.fresh_range
    disk.read(source)
    disk.window.stop_reading(source)
    assert disk.take() == [1]


def test_full_window_leaves_newcomers_on_disk_and_finds_them_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ready_window, "WINDOW_LIMIT", 3)
    disk = Disk(page=2)
    assert disk.take() == []
    for number in (10, 30, 20, 40, 25, 5, 15):
        disk.commit(number)
    taken = []
    while batch := disk.take(2):
        taken += batch
    assert taken == [5, 10, 15, 20, 25, 30, 40]


def test_cursor_never_goes_back_over_what_was_delivered() -> None:
    disk = Disk(*range(10), page=4)
    disk.take()
    assert disk.window.fresh_range.low is None
    disk.commit(20)
    assert disk.window.fresh_range.low is None, "new mail went past memory"
    assert disk.take() == [20]


def test_skipped_deliveries_beyond_the_limit_are_spilled_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready_window, "SKIPPED_LIMIT", 2)
    disk = Disk(1, 2, 3, 4)
    disk.take(0)
    spill: Taken = {}
    while (source := disk.window.take(10, {"example.net"}, NOW, {}, spill)) is not None:
        if source is disk.window.fresh_range:
            disk.absorb(source, disk.read(source))
        else:
            disk.window.start_reading(source)
            disk.window.absorb(source, [], None, NOW)
    assert [int(key.message_id, 16) for key in spill] == [3, 4]
    for key in spill:
        disk.window.spilled("example.net", key)
    found: Taken = {}
    behind = disk.window.take_domain("example.net", 10, found)
    assert [int(key.message_id, 16) for key in found] == [1, 2]
    assert behind is not None
    assert behind.low == records.domain_key(fresh(3).key, "example.net")


def test_stale_hint_is_dropped_when_read() -> None:
    disk = Disk()
    disk.take()
    window = disk.window
    for number in (1, 2, 3):
        window.spilled("example.net", fresh(number).key)
    disk.busy.add(fresh(1).key)
    postponed = structs.replace(fresh(2), next_attempt=NOW + 50)
    source = window.take_domain("example.net", 10, {})
    assert source is not None
    window.start_reading(source)
    window.absorb(source, [fresh(1), postponed, fresh(3)], None, NOW)
    found: Taken = {}
    assert window.take_domain("example.net", 10, found) is None
    assert list(found) == [fresh(3).key]
