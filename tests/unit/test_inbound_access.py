from __future__ import annotations

import ipaddress

import pytest

from zonerelay.config.models import OPEN_RELAY_WORDS, ListenerSettings
from zonerelay.inbound.access import MAX_REMEMBERED, AccessPolicy, Reason
from zonerelay.inbound.deadlines import Deadlines
from zonerelay.inbound.limits import ConnectionLimits

NETWORKS = (ipaddress.ip_network("192.0.2.0/24"), ipaddress.ip_network("2001:db8::/32"))

TABLE = [
    ("192.0.2.7", True, "192.0.2.7", "in a network"),
    ("192.0.3.7", False, "192.0.3.7", "in none"),
    ("::ffff:192.0.2.7", True, "192.0.2.7", "IPv4 on a dual-stack socket"),
    ("::ffff:192.0.3.7", False, "192.0.3.7", "the same, outside"),
    ("2001:db8:1::1", True, "2001:db8:1::1", "IPv6"),
    ("fe80::1%eth0", False, "fe80::1", "with a scope"),
    ("::192.0.2.7", False, "::c000:207", "compatible is not mapped"),
]


@pytest.mark.parametrize(("peer", "may", "shown", "reason"), TABLE, ids=[row[3] for row in TABLE])
def test_who_may_relay(peer: str, may: bool, shown: str, reason: str) -> None:
    policy = AccessPolicy(ListenerSettings(allow_networks=NETWORKS))
    for _ in range(2):
        client = policy.identify((peer, 4711))
        assert (client.may_relay, client.address, client.port) == (may, shown, 4711)


def test_nobody_relays_without_networks_and_words_open_it() -> None:
    closed = AccessPolicy(ListenerSettings(allow_networks=()))
    assert not closed.identify(("127.0.0.1", 1)).may_relay
    opened = AccessPolicy(ListenerSettings(allow_networks=(), open_relay=OPEN_RELAY_WORDS))
    assert opened.identify(("198.51.100.1", 1)).may_relay
    misspelt = AccessPolicy(ListenerSettings(allow_networks=(), open_relay=OPEN_RELAY_WORDS.lower()))
    assert not misspelt.identify(("198.51.100.1", 1)).may_relay


def test_a_tcp_client_without_a_name_is_not_taken_for_a_local_one() -> None:
    """A connection that is reset before it is accepted has no peername."""
    tcp = AccessPolicy(ListenerSettings(address="0.0.0.0:25"))
    assert not tcp.identify(None).may_relay
    assert not tcp.identify("").may_relay
    assert AccessPolicy(ListenerSettings(address="unix:/run/x", allow_networks=())).identify("").may_relay


def test_remembered_clients_are_bounded() -> None:
    policy = AccessPolicy(ListenerSettings(allow_networks=NETWORKS))
    for number in range(3 * MAX_REMEMBERED):
        policy.identify((str(ipaddress.ip_address(number)), 1))
        assert len(policy._known) <= MAX_REMEMBERED


def test_connections_are_counted_in_total_and_by_client() -> None:
    limits = ConnectionLimits(total=3, per_client=2)
    assert limits.enter("a") is None
    assert limits.enter("a") is None
    assert limits.enter("a") is Reason.CLIENT_CONNECTIONS
    assert limits.enter("b") is None
    assert limits.enter("c") is Reason.CONNECTIONS
    limits.leave("a")
    assert limits.enter("a") is None
    for client in ("a", "a", "b"):
        limits.leave(client)
    assert limits.count == 0
    assert limits._clients == {}, "clients that left are forgotten"


def test_clients_of_a_unix_socket_count_in_total_only() -> None:
    limits = ConnectionLimits(total=2, per_client=1)
    assert [limits.enter("") for _ in range(3)] == [None, None, Reason.CONNECTIONS]


def test_idle_time_starts_again_with_each_answer() -> None:
    deadlines = Deadlines(0, idle=10, transaction=100)
    assert deadlines.late(9.9) is None
    deadlines.answered(9, in_transaction=False)
    assert deadlines.late(18.9) is None
    late = deadlines.late(19)
    assert late is not None
    assert late.reason is Reason.IDLE


def test_transaction_time_runs_from_its_first_command() -> None:
    deadlines = Deadlines(0, idle=10, transaction=20)
    for now in range(0, 20, 5):
        deadlines.answered(now, in_transaction=True)
        assert deadlines.late(now) is None
    late = deadlines.late(20)
    assert late is not None
    assert late.reason is Reason.TRANSACTION_TIME
    deadlines.complete()
    assert deadlines.late(20) is None


def test_next_look_is_never_too_late_for_what_may_begin_meanwhile() -> None:
    deadlines = Deadlines(0, idle=300, transaction=20)
    look = deadlines.next_look(0)
    deadlines.answered(0.1, in_transaction=True)
    assert look <= 0.1 + 20
    assert deadlines.next_look(look) == pytest.approx(20.1)
