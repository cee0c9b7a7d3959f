"""[redis]: what is refused, and what an operator is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from zonerelay.config.checks import advice, check
from zonerelay.config.problems import Report
from zonerelay.config.settings import Backend, RedisSettings, Settings, SpoolSettings, UnsafeStore


def settings(redis: RedisSettings) -> Settings:
    return Settings(hostname="relay.example.org", spool=SpoolSettings(backend=Backend.REDIS), redis=redis)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("url", "http://127.0.0.1", "another protocol"),
        ("url", "127.0.0.1:6379", "no scheme"),
        ("url", "redis://:secret@127.0.0.1/0", "a password where everybody reads it"),
        ("ca_file", Path("/ca.pem"), "certificates without TLS"),
        ("prefix", "", "the keys of others"),
        ("prefix", "a b:", "a space, which separates fields"),
    ],
)
def test_refused(key: str, value: object, why: str) -> None:
    report = Report({})
    check(settings(replace(RedisSettings(), **{key: value})), report)  # type: ignore[arg-type]
    assert ("redis", key) in report.wrong, why


@pytest.mark.parametrize(
    ("redis", "told"),
    [
        (RedisSettings(), ""),
        (RedisSettings(url="unix:///run/redis.sock"), ""),
        (RedisSettings(url="rediss://10.0.0.1/0", ca_file=Path("/ca.pem")), ""),
        (RedisSettings(url="redis://10.0.0.1/0"), "redis.url"),
        (RedisSettings(unsafe=(UnsafeStore.MAIL_LOSS,)), "redis.unsafe"),
        (RedisSettings(lease=5.0, timeout=10.0), "redis.lease"),
    ],
)
def test_taken_with_advice(redis: RedisSettings, told: str) -> None:
    report = Report({})
    check(settings(redis), report)
    assert not [path for path in report.wrong if path[0] == "redis"]
    said = [line for line in advice(settings(redis), "relay.example.org") if line.startswith("redis.")]
    assert [line.partition(":")[0] for line in said] == ([told] if told else [])
