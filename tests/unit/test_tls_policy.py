"""The memory of hosts whose TLS is broken: it fades, and it is bounded."""

from __future__ import annotations

import ssl

import pytest

from zonerelay.delivery import peer as expiring_set
from zonerelay.delivery.tls.plan import TlsPolicy
from zonerelay.model.clock import ManualClock


def test_broken_host_is_tried_again_after_a_while() -> None:
    clock = ManualClock()
    policy = TlsPolicy(clock, remember_broken=60.0)
    policy.broken.add("mx:25")
    assert "mx:25" in policy.broken
    assert "another:25" not in policy.broken
    clock.step(-3600.0)  # the wall clock does not matter
    clock.advance(59.0)
    assert "mx:25" in policy.broken
    clock.advance(1.0)
    assert "mx:25" not in policy.broken


def test_only_so_many_hosts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiring_set, "MAX_REMEMBERED", 3)
    policy = TlsPolicy(ManualClock(), remember_broken=60.0)
    for name in ("a", "b", "c", "a", "d"):
        policy.broken.add(name)
    assert [name in policy.broken for name in "abcd"] == [True, False, True, True]


def test_only_verify_looks_at_certificates() -> None:
    policy = TlsPolicy(ManualClock(), remember_broken=60.0)
    assert policy.context(verify=False, small=False).verify_mode is ssl.CERT_NONE
    verifying = policy.context(verify=True, small=False)
    assert verifying.verify_mode is ssl.CERT_REQUIRED
    assert policy.context(verify=True, small=False) is verifying


def test_old_versions_of_tls_are_not_spoken() -> None:
    policy = TlsPolicy(ManualClock(), remember_broken=60.0)
    for verify in (False, True):
        assert policy.context(verify=verify, small=False).minimum_version >= ssl.TLSVersion.TLSv1_2
