"""`zonerelay outbox`: what it prints works, and what it finds wrong it says."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from tests.support.outbox import OutboxBed
from zonerelay.cli.main import main


def test_tables_are_printed_and_checked_and_rows_counted(
    bed: OutboxBed, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "outbox.key"
    key.write_text("00" * 32)
    config = tmp_path / "zonerelay.toml"
    config.write_text(f'[outbox]\nurl = "{bed.server.url}"\nschema = "{bed.schema}"\nkeys = ["{key}"]\n')

    def run(*arguments: str) -> tuple[int, str]:
        status = main(["outbox", arguments[0], "--config", str(config), *arguments[1:]])
        said = capsys.readouterr()
        return status, said.out + said.err

    status, said = run("status")
    assert status == 1
    assert f"there is no table {bed.schema}.outbound_messages" in said
    bed.server.psql(run("schema")[1])
    bed.insert()
    assert '"queued":1,"processing":0,"sent":0,"failed":0' in run("status", "--json")[1]
    assert "queued      1" in run("status")[1]
    bed.psql("ALTER TABLE outbound_messages DROP COLUMN sender, ALTER COLUMN subject TYPE bytea USING ''")
    status, said = run("status")
    assert "outbound_messages has no column sender (text)" in said
    assert "outbound_messages.subject is bytea, not text" in said
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"secret\n")))
    status, said = run("encrypt-password", "--host", "smtp.example.net", "--user", "relay")
    assert status == 0
    assert said.startswith("zr1.")
    assert "secret" not in said
