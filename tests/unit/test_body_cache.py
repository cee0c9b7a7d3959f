"""Which bodies stay in memory, and that their octets are counted right."""

from __future__ import annotations

from tests.store.builders import message_id
from zonerelay.store.common.body import BodyCache

ONE, TWO, THREE = (message_id(number) for number in (1, 2, 3))


def test_small_body_is_found_until_it_is_dropped() -> None:
    cache = BodyCache()
    cache.put(ONE, b"body")
    cache.put(TWO, b"")
    assert cache.get(ONE, 1) == (b"body",)
    assert cache.get(TWO, 0) == ()
    cache.drop(ONE)
    assert cache.get(ONE, 1) is None


def test_oldest_goes_when_there_is_no_room() -> None:
    cache = BodyCache(capacity=20)
    for identity in (ONE, TWO, THREE):
        cache.put(identity, b"x" * 9)
    assert [cache.get(identity, 1) is None for identity in (ONE, TWO, THREE)] == [True, False, False]


def test_body_put_twice_is_counted_once() -> None:
    cache = BodyCache(capacity=20)
    cache.put(ONE, b"x" * 9)
    for _ in range(10):
        cache.put(TWO, b"y" * 9)
        cache.extend(THREE, 1, [])
        cache.drop(THREE)
    assert cache.get(ONE, 1) == (b"x" * 9,)


def test_large_body_is_found_when_all_its_chunks_came() -> None:
    cache = BodyCache()
    cache.extend(ONE, 1, [b"a", b"b"])
    assert cache.get(ONE, 3) is None
    cache.extend(ONE, 3, [b"c"])
    assert cache.get(ONE, 3) == (b"a", b"b", b"c")
    cache.extend(ONE, 1, [b"d"])
    assert cache.get(ONE, 1) == (b"d",), "written once more from its beginning"


def test_body_whose_beginning_was_pushed_out_is_not_kept() -> None:
    cache = BodyCache(capacity=20)
    cache.extend(ONE, 1, [b"x" * 15])
    cache.put(TWO, b"y" * 10)
    cache.extend(ONE, 2, [b"z"])
    assert cache.get(ONE, 2) is None
    assert cache.get(ONE, 1) is None


def test_too_large_a_body_leaves_the_others_alone() -> None:
    cache = BodyCache(capacity=100, largest=30)
    cache.put(ONE, b"x" * 30)
    for first in range(1, 20):
        cache.extend(TWO, first, [b"y" * 10])
    assert cache.get(ONE, 1) is not None
    assert cache.get(TWO, 19) is None
