from __future__ import annotations

import ipaddress

import pytest

from zonerelay.config.settings import ListenerSettings, UnsafeListener
from zonerelay.inbound.access.networks import MAX_REMEMBERED, AccessPolicy

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


def test_nobody_relays_without_networks_and_open_relay_opens_it() -> None:
    closed = AccessPolicy(ListenerSettings(allow_networks=()))
    assert not closed.identify(("127.0.0.1", 1)).may_relay
    opened = AccessPolicy(ListenerSettings(allow_networks=(), unsafe=(UnsafeListener.OPEN_RELAY,)))
    assert opened.identify(("198.51.100.1", 1)).may_relay


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
