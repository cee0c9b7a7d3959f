"""[s3]: what is refused, and what an operator is told."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from zonerelay.config.checks import advice, check
from zonerelay.config.load import load_text
from zonerelay.config.problems import Report
from zonerelay.config.settings import (
    Backend,
    S3Settings,
    Settings,
    SpoolSettings,
)

PAGE = Path(__file__).parents[2] / "docs" / "store" / "s3.md"
SOUND = S3Settings(bucket="mail-queue")


def settings(s3: S3Settings) -> Settings:
    return Settings(hostname="relay.example.org", spool=SpoolSettings(backend=Backend.S3), s3=s3)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("bucket", "", "no bucket"),
        ("bucket", "Mail_Queue", "is not a bucket name"),
        ("prefix", "", "the keys of others"),
        ("prefix", "mail", "no slash behind it: mail and mail2 would run into each other"),
        ("prefix", "a b/", "a space"),
        ("prefix", "/", "an empty name"),
        ("endpoint_url", "s3.example.org", "no scheme"),
        ("endpoint_url", "https://key:secret@s3.example.org", "a secret where everybody reads it"),
        ("endpoint_url", "https://s3.example.org:port", "no port"),
        ("secret_key", "env:SECRET", "a secret of no key"),
        ("queue_url", "sqs.example.org/queue", "no scheme"),
    ],
)
def test_refused(key: str, value: object, why: str) -> None:
    report = Report({})
    check(settings(replace(SOUND, **{key: value})), report)  # type: ignore[arg-type]
    assert [path for path in report.wrong if path[0] == "s3"], why


def test_alerts_to_nobody_are_refused() -> None:
    report = Report({})
    check(settings(replace(SOUND, shared=False, queue_url="https://sqs.example.org/1/queue")), report)
    assert ("s3", "queue_url") in report.wrong


@pytest.mark.parametrize(
    ("s3", "told"),
    [
        (SOUND, ""),
        (replace(SOUND, endpoint_url="http://127.0.0.1:9000"), ""),
        (replace(SOUND, endpoint_url="http://s3.example.org"), "s3.endpoint_url"),
        (replace(SOUND, lease=5.0), "s3.lease"),
    ],
)
def test_taken_with_advice(s3: S3Settings, told: str) -> None:
    report = Report({})
    check(settings(s3), report)
    assert not [path for path in report.wrong if path[0] == "s3"]
    said = [line for line in advice(settings(s3), "relay.example.org") if line.startswith("s3.")]
    assert [line.partition(":")[0] for line in said] == ([told] if told else [])


def test_examples_of_the_page_load() -> None:
    examples = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert examples
    for example in examples:
        load_text(example)
        load_text(re.sub(r"^#(?=[a-z])", "", example, flags=re.MULTILINE))
