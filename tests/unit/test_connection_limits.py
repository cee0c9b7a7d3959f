from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zonerelay.config.settings import ListenerSettings
from zonerelay.inbound.limits.connections import ConnectionLimits, client_key
from zonerelay.inbound.refusal import Reason

ADDRESSES = [
    "", "192.0.2.1", "192.0.2.2", "192.0.3.1",
    "2001:db8:1:1::1", "2001:db8:1:1::2", "2001:db8:1:2::1", "2001:db8:2::1",
]  # fmt: skip


def limits_of(*, total: int, per_client: int, per_network: int) -> ConnectionLimits:
    settings = ListenerSettings(
        max_connections=total,
        max_connections_per_client=per_client,
        max_connections_per_network=per_network,
    )
    return ConnectionLimits(settings)


def is_empty(limits: ConnectionLimits) -> bool:
    return (limits.count, limits._clients, limits._networks) == (0, {}, {})


def test_connections_are_counted_in_total_and_by_client() -> None:
    limits = limits_of(total=3, per_client=2, per_network=9)
    assert limits.enter("192.0.2.1") is None
    assert limits.enter("192.0.2.1") is None
    assert limits.enter("192.0.2.1") is Reason.CLIENT_CONNECTIONS
    assert limits.enter("192.0.2.2") is None
    assert limits.enter("192.0.2.3") is Reason.CONNECTIONS
    limits.leave("192.0.2.1")
    assert limits.enter("192.0.2.1") is None
    for client in ("192.0.2.1", "192.0.2.1", "192.0.2.2"):
        limits.leave(client)
    assert is_empty(limits), "clients that left are forgotten"


SAME = [
    ("192.0.2.1", "192.0.2.1", True, True, "one IPv4 address"),
    ("192.0.2.1", "192.0.2.255", False, True, "one /24"),
    ("192.0.2.1", "192.0.20.1", False, False, "neighbouring /24s, one of which begins like the other"),
    ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True, True, "one /64: a machine chooses the rest itself"),
    ("2001:db8:1:2::1", "2001:db8:1:3::1", False, True, "one /48: a customer chooses the rest"),
    ("2001:db8:1:2::1", "2001:db8:2:2::1", False, False, "two /48s"),
    ("2001:db8::1", "2001:db8:0:0:1::", True, True, "zeros that are not written"),
    ("::1", "127.0.0.1", False, False, "the families have nothing in common"),
]


@pytest.mark.parametrize(("one", "other", "client", "network", "reason"), SAME, ids=[row[4] for row in SAME])
def test_what_one_client_and_one_network_are(
    one: str, other: str, client: bool, network: bool, reason: str
) -> None:
    assert (client_key(one) == client_key(other)) is client, reason
    limits = limits_of(total=9, per_client=1, per_network=9)
    limits.enter(one)
    assert limits.enter(other) is (Reason.CLIENT_CONNECTIONS if client else None)
    limits = limits_of(total=9, per_client=9, per_network=1)
    limits.enter(one)
    assert limits.enter(other) is (Reason.NETWORK_CONNECTIONS if network else None)


def test_who_has_no_address_counts_in_total_only() -> None:
    limits = limits_of(total=2, per_client=1, per_network=1)
    assert [limits.enter("") for _ in range(3)] == [None, None, Reason.CONNECTIONS]


def test_a_client_behind_a_balancer_is_counted_as_itself() -> None:
    limits = limits_of(total=9, per_client=1, per_network=2)
    for client in ("192.0.2.1", "192.0.2.2"):
        assert limits.enter("") is None
        assert limits.move("", client) is None
    assert limits.enter("") is None
    assert limits.move("", "192.0.2.1") is Reason.CLIENT_CONNECTIONS
    assert limits.move("", "192.0.2.3") is Reason.NETWORK_CONNECTIONS
    limits.leave("")
    for client in ("192.0.2.1", "192.0.2.2"):
        limits.leave(client)
    assert is_empty(limits)


def test_a_move_does_not_meet_itself() -> None:
    limits = limits_of(total=1, per_client=1, per_network=1)
    limits.enter("192.0.2.1")
    assert limits.move("192.0.2.1", "192.0.2.1") is None
    assert limits.move("192.0.2.1", "192.0.2.2") is None
    assert limits.move("192.0.2.2", "") is None
    limits.leave("")
    assert is_empty(limits)


def test_lower_limits_let_who_is_there_leave() -> None:
    limits = limits_of(total=9, per_client=9, per_network=9)
    for _ in range(3):
        limits.enter("192.0.2.1")
    limits.settings = limits_of(total=9, per_client=9, per_network=2).settings
    assert limits.enter("192.0.2.9") is Reason.NETWORK_CONNECTIONS
    for _ in range(3):
        limits.leave("192.0.2.1")
    assert limits.enter("192.0.2.9") is None


@given(st.lists(st.tuples(st.sampled_from(ADDRESSES), st.sampled_from(ADDRESSES)), max_size=40))
def test_counts_are_those_of_who_is_there(steps: list[tuple[str, str]]) -> None:
    """Enter as the one, move to the other when there is room, and leave: nothing stays counted."""
    limits = limits_of(total=20, per_client=2, per_network=3)
    inside: list[str] = []
    for first, then in steps:
        if limits.enter(first) is None:
            inside.append(then if limits.move(first, then) is None else first)
        assert limits.count == len(inside)
        assert (
            sum(limits._clients.values()) == sum(limits._networks.values()) == len([a for a in inside if a])
        )
        assert all(0 < count <= 2 for count in limits._clients.values())
        assert all(0 < count <= 3 for count in limits._networks.values())
    for address in inside:
        limits.leave(address)
    assert is_empty(limits)
