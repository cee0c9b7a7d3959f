"""The cursors of a queue: races between reading the disk and what happens meanwhile."""

from __future__ import annotations

from msgspec import structs

from tests.store.builders import NOW, delivery_for, envelope_for, message_id
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.queue_name import queue_of
from zonerelay.store import records
from zonerelay.store.queue.cursors import DiskRange, QueueCursors, Taken


class Disk:
    """What is stored, and cursors that read one page of `page` rows when it asks."""

    def __init__(self, *stored: int, page: int = 100) -> None:
        self.rows: dict[DeliveryKey, Delivery] = {}
        self.busy: set[DeliveryKey] = set()
        self.cursors = QueueCursors(queue_of("default"), self.busy.__contains__, empty=False)
        self.page = page
        for number in stored:
            delivery = fresh(number)
            self.rows[delivery.key] = delivery

    def commit(self, number: int) -> None:
        delivery = fresh(number)
        self.rows[delivery.key] = delivery
        self.cursors.add(delivery.key, delivery)

    def read(self, source: DiskRange) -> tuple[list[Delivery], bytes | None]:
        """What the reader thread sees at this moment."""
        start = self.cursors.start_reading(source)
        keys = sorted(key for key in self.rows if records.delivery_key(key) >= start)
        behind = [records.delivery_key(key) for key in keys[self.page :]]
        return [self.rows[key] for key in keys[: self.page]], behind[0] if behind else None

    def absorb(self, source: DiskRange, read: tuple[list[Delivery], bytes | None]) -> None:
        self.cursors.put_back(self.cursors.absorb(source, *read, NOW))

    def take(self, limit: int = 100, skip: tuple[str, ...] = ()) -> list[int]:
        """A whole claim."""
        found: Taken = {}
        while (source := self.cursors.take(limit, skip, NOW, found, {})) is not None:
            self.busy.update(found)
            if source is self.cursors.fresh_range:
                self.absorb(source, self.read(source))
            else:
                self.cursors.start_reading(source)
                self.cursors.absorb(source, [], None, NOW)
        self.busy.update(found)
        return [int(key.message_id, 16) for key in found]


def fresh(number: int) -> Delivery:
    return delivery_for(envelope_for(message_id(number), "a@example.net"), "a@example.net")


def test_commit_during_a_read_that_did_not_see_it_is_not_missed() -> None:
    disk = Disk(1, 9)
    source = disk.cursors.fresh_range
    read = disk.read(source)
    disk.commit(5)
    disk.absorb(source, read)
    assert disk.take() == [1, 5, 9]


def test_commit_behind_the_page_that_is_being_read_is_not_missed() -> None:
    disk = Disk(1, 2, page=2)
    source = disk.cursors.fresh_range
    read = disk.read(source)
    disk.commit(3)
    disk.absorb(source, read)
    assert disk.take() == [1, 2, 3]


def test_delivery_finished_during_the_read_that_saw_it_does_not_come_back() -> None:
    disk = Disk(1, 2)
    source = disk.cursors.fresh_range
    read = disk.read(source)
    disk.cursors.forget(fresh(1).key)
    del disk.rows[fresh(1).key]
    disk.absorb(source, read)
    assert disk.take() == [2]


def test_delivery_whose_commit_is_not_confirmed_yet_is_left_to_its_confirmation() -> None:
    disk = Disk(1)
    disk.busy.add(fresh(1).key)
    assert disk.take() == []
    disk.busy.clear()
    disk.cursors.add(fresh(1).key, fresh(1))
    assert disk.take() == [1]


def test_failed_read_is_tried_again() -> None:
    disk = Disk(1)
    source = disk.cursors.fresh_range
    disk.read(source)
    disk.cursors.stop_reading(source)
    assert disk.take() == [1]


def test_newcomers_stay_on_disk_and_are_found_in_order() -> None:
    disk = Disk(page=2)
    assert disk.take() == []
    for number in (10, 30, 20, 40, 25, 5, 15):
        disk.commit(number)
    taken = []
    while batch := disk.take(2):
        taken += batch
    assert taken == [5, 10, 15, 20, 25, 30, 40]


def test_new_mail_is_given_away_only_while_nothing_older_waits() -> None:
    disk = Disk(1)
    assert not disk.cursors.is_next(fresh(2)), "the disk has not been read"
    assert disk.take() == [1]
    assert disk.cursors.is_next(fresh(2))
    assert not disk.cursors.is_next(structs.replace(fresh(2), next_attempt=NOW + 5))
    disk.cursors.put_back([fresh(1)])
    assert not disk.cursors.is_next(fresh(2)), "one that was released comes first"
    disk.busy.clear()
    assert disk.take() == [1]
    disk.commit(5)
    assert not disk.cursors.is_next(fresh(6)), "one on disk comes first"
    assert disk.cursors.is_next(fresh(4)), "the disk has none that is older"


def test_new_mail_is_given_away_beside_a_backlog_that_was_not_read() -> None:
    disk = Disk(*range(1, 9), page=2)
    disk.take(1)
    assert disk.cursors.take_new(10, message_id(20), (), {}, {}) is disk.cursors.new_range
    source = disk.cursors.new_range
    assert source is not None
    disk.absorb(source, disk.read(source))
    assert disk.cursors.is_next(fresh(21))
    assert not disk.cursors.is_next(fresh(10)), "it belongs to the backlog"


def test_cursor_never_goes_back_over_what_was_delivered() -> None:
    disk = Disk(*range(10), page=4)
    disk.take()
    assert disk.cursors.fresh_range.low is None
    disk.commit(20)
    assert disk.cursors.fresh_range.low == records.delivery_key(fresh(20).key)
    assert disk.take() == [20]


def test_skipped_deliveries_are_for_the_index_of_their_domain() -> None:
    disk = Disk(1, 2, 3)
    disk.take(0)
    cursors = disk.cursors
    spill: Taken = {}
    while (source := cursors.take(10, {"example.net"}, NOW, {}, spill)) is not None:
        if source is cursors.fresh_range:
            disk.absorb(source, disk.read(source))
        else:
            cursors.start_reading(source)
            cursors.absorb(source, [], None, NOW)
    assert [int(key.message_id, 16) for key in spill] == [1, 2, 3]
    assert cursors.take_domain("example.net") is None
    for key in spill:
        cursors.spilled("example.net", key)
    source = cursors.take_domain("example.net")
    assert source is not None
    assert source.low == records.domain_key(fresh(1).key, "example.net")


def test_stale_hint_is_dropped_when_read() -> None:
    disk = Disk()
    disk.take()
    cursors = disk.cursors
    for number in (1, 2, 3):
        cursors.spilled("example.net", fresh(number).key)
    disk.busy.add(fresh(1).key)
    postponed = structs.replace(fresh(2), next_attempt=NOW + 50)
    source = cursors.take_domain("example.net")
    assert source is not None
    cursors.start_reading(source)
    assert cursors.absorb(source, [fresh(1), postponed, fresh(3)], None, NOW) == [fresh(3)]
    assert cursors.take_domain("example.net") is None
