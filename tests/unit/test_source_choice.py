"""A message keeps its source, the weights are kept, and nobody else's mail moves."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zonerelay.config.settings import SourceSettings, SourceUnit
from zonerelay.delivery.source import in_order, key_of, shares
from zonerelay.model.address import NULL_SENDER, Mailbox
from zonerelay.model.message_id import MessageId

IDS = [f"019aa1f2{number:08x}" for number in range(20_000)]


def source(name: str, weight: int = 1) -> SourceSettings:
    return SourceSettings(name=name, address=("192.0.2.1",), weight=weight)


def names(sources: list[SourceSettings]) -> list[str]:
    return [each.name for each in sources]


@pytest.mark.parametrize("weights", [(1, 1), (1, 2, 3), (10, 1), (1, 1, 1, 1, 1), (500, 300, 200)])
def test_messages_are_shared_by_weight(weights: tuple[int, ...]) -> None:
    sources = [source(f"out{at}", weight) for at, weight in enumerate(weights)]
    taken = Counter(in_order(sources, key)[0].name for key in IDS)
    for each, share in zip(sources, shares(sources), strict=True):
        assert abs(taken[each.name] / len(IDS) - share) < 0.02


def test_the_second_choice_is_shared_by_weight_too() -> None:
    """When one is passed over its mail does not all go to one neighbour."""
    sources = [source("a", 1), source("b", 1), source("c", 3)]
    seconds = Counter(order[1] for order in (names(in_order(sources, key)) for key in IDS) if order[0] == "a")
    total = sum(seconds.values())
    assert abs(seconds["c"] / total - 0.75) < 0.03


_sources = st.lists(
    st.builds(source, st.text("abcdefgh.-_0123456789", min_size=1, max_size=8), st.integers(0, 1000)),
    min_size=1,
    max_size=6,
    unique_by=lambda each: each.name,
)


@given(_sources, st.text(max_size=30), st.randoms())
def test_the_order_depends_on_nothing_but_names_weights_and_key(
    sources: list[SourceSettings], key: str, random: Random
) -> None:
    shuffled = list(sources)
    random.shuffle(shuffled)
    assert in_order(sources, key) == in_order(shuffled, key)
    assert sorted(names(in_order(sources, key))) == sorted(each.name for each in sources if each.weight)


@given(_sources, st.text(max_size=30), st.integers(0, 5))
def test_taking_one_out_moves_only_its_own_mail(sources: list[SourceSettings], key: str, at: int) -> None:
    gone = sources[at % len(sources)]
    before = in_order(sources, key)
    after = in_order([each for each in sources if each is not gone], key)
    assert after == [each for each in before if each is not gone]


@given(_sources, st.text(max_size=30))
def test_a_heavier_source_only_gains(sources: list[SourceSettings], key: str) -> None:
    light = sources[0]
    heavy = source(light.name, light.weight + 500)
    before = names(in_order(sources, key))
    after = names(in_order([heavy, *sources[1:]], key))
    if light.weight:
        assert after.index(light.name) <= before.index(light.name)
    assert [name for name in before if name != light.name] == [name for name in after if name != light.name]


def test_what_stays_together() -> None:
    first, second = MessageId(IDS[0]), MessageId(IDS[1])
    sender = Mailbox("Ann@Example.org")
    assert key_of(SourceUnit.MESSAGE, first, sender) != key_of(SourceUnit.MESSAGE, second, sender)
    assert key_of(SourceUnit.SENDER, first, sender) == key_of(
        SourceUnit.SENDER, second, Mailbox("ann@EXAMPLE.org")
    )
    assert key_of(SourceUnit.SENDER, first, sender) != key_of(
        SourceUnit.SENDER, first, Mailbox("bob@example.org")
    )
    # Reports are nobody's: they are shared like messages.
    assert key_of(SourceUnit.SENDER, first, NULL_SENDER) != key_of(SourceUnit.SENDER, second, NULL_SENDER)


def test_choices_do_not_change_between_versions() -> None:
    """Mail that waits in a spool would go out from elsewhere after an update."""
    sources = [source("out1"), source("out2", 2), source("out3")]
    assert [names(in_order(sources, key)) for key in IDS[:4]] == [
        ["out3", "out2", "out1"],
        ["out1", "out3", "out2"],
        ["out2", "out1", "out3"],
        ["out2", "out3", "out1"],
    ]
