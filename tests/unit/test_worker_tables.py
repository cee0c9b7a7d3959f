"""A reload makes the tables of what has changed alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from zonerelay.config.load import load_text
from zonerelay.message.dkim import keys
from zonerelay.message.dkim.keys import PrivateKey, load_private_key, new_private_key
from zonerelay.model.envelope import Origin
from zonerelay.worker.tables import build_tables

TEXT = """
[[listener]]
address = "127.0.0.1:0"
allow_networks = ["192.0.2.0/24"]

[[zone]]
name = "default"

[[zone]]
name = "bulk"

[[route]]
zone = "bulk"
recipient_domain = ["a.example"]

[[access]]
action = "refuse"
sender = ["b@a.example"]

[[destination]]
mx = ["mx.a.example"]
max_connections = 2
"""


def key(file: Path, domain: str) -> str:
    file.write_text(new_private_key("ed25519-sha256"))
    file.chmod(0o600)
    return f'[[dkim]]\ndomain = "{domain}"\nselector = "s"\nkey_file = "{file}"\n'


def test_what_has_not_changed_stays_the_object_that_it_was() -> None:
    old = build_tables(load_text(TEXT), 0.0)
    same = build_tables(load_text(TEXT), 0.0, old)
    assert same.settings.zone is old.settings.zone
    assert same.settings.listener[0] is old.settings.listener[0]
    assert (same.zones, same.rules, same.destinations) == (old.zones, old.rules, old.destinations)


def test_what_has_changed_is_made_anew() -> None:
    old = build_tables(load_text(TEXT), 0.0)
    changed = TEXT.replace("b@a", "c@a").replace('name = "bulk"', 'name = "bulk"\nmax_connections = 3')
    new = build_tables(load_text(changed), 0.0, old)
    assert new.settings.zone[0] is old.settings.zone[0]
    assert new.settings.zone[1].max_connections == 3
    assert new.zones.get("bulk").max_connections == 3
    assert new.destinations is old.destinations
    assert new.rules.access is not None
    assert new.rules.access.decide(Origin(), "c@a.example", "d@e.example") is not None
    assert new.rules.access.decide(Origin(), "b@a.example", "d@e.example") is None


def test_keys_that_have_not_changed_are_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[bytes] = []

    def load(pem: bytes) -> PrivateKey:
        tried.append(pem)
        return load_private_key(pem)

    monkeypatch.setattr(keys, "load_private_key", load)
    text = TEXT + key(tmp_path / "a", "a.example") + key(tmp_path / "b", "b.example")
    old = build_tables(load_text(text), 0.0)
    assert len(tried) == 2
    (tmp_path / "b").write_text(new_private_key("ed25519-sha256"))
    new = build_tables(load_text(text), 0.0, old)
    assert len(tried) == 3
    assert old.dkim_keys is not None
    assert new.dkim_keys is not None
    before, after = old.dkim_keys.entries, new.dkim_keys.entries
    assert before[0].key is after[0].key
    assert before[1].key.public != after[1].key.public
