"""An outbox, a sink that takes everything, and a smarthost that wants STARTTLS and a log-in."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trustme

from tests.support.outbox import LOOPBACK


@pytest.fixture
def server_tls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ssl.SSLContext:
    """For a server on loopback, whom this process trusts."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(LOOPBACK).configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "authority.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
    return context
