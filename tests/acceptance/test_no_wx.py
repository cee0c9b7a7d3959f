"""Why the unit says MemoryDenyWriteExecute=no: certificates of clients need it, and nothing else does."""

import smtplib
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import no_wx
from tests.support.certificates import DAY, NOW, make
from tests.support.credentials import file_of, user
from tests.support.ports import LOOPBACK
from tests.support.process import RelayFailed, RelayProcess

FORBIDDEN = (sys.executable, no_wx.__file__)


def starttls(directory: Path) -> dict[str, str]:
    made = make("relay.test", starts=time.time() - DAY, ends=time.time() + 90 * DAY)
    certificate, key = made.write(directory, "relay")
    return {"tls": "starttls", "certificate": str(certificate), "key": str(key)}


def test_a_relay_that_takes_no_certificates_of_clients_makes_no_code_in_memory(tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.write_text(file_of(user()))
    listener = {"auth": "required", **starttls(tmp_path)}
    tables = {"auth": {"credentials": str(users)}}
    with RelayProcess(
        tmp_path / "relay", next_hop="127.0.0.1:1", listener=listener, tables=tables, launcher=FORBIDDEN
    ) as relay:
        with smtplib.SMTP(LOOPBACK, relay.smtp_port, timeout=10) as client:
            client.starttls(context=ssl._create_unverified_context())
            client.login("app", "correct horse")
            client.sendmail("app@example.org", ["b@example.com"], b"Subject: x\r\n\r\nx\r\n")
        relay.wait_for(lambda: relay.events("deferred") != [], what="an attempt")
        assert relay.terminate() == 0
        assert relay.events("trouble") == []


def test_with_certificates_of_clients_the_relay_says_what_has_to_be_allowed(tmp_path: Path) -> None:
    listener = {"allow_certificates": ["cd" * 32], **starttls(tmp_path)}
    relay = RelayProcess(tmp_path / "relay", listener=listener, launcher=FORBIDDEN)
    with pytest.raises(RelayFailed, match="exited with 1"):
        relay.start()
    (line,) = [line for line in relay.log_text().splitlines() if line.startswith("zonerelay: ")]
    assert "MemoryDenyWriteExecute=no" in line
    assert "Traceback" not in relay.log_text()


def test_dane_makes_no_code_in_memory_either() -> None:
    """A TLSA record of an authority needs the same library as TLS for clients, in another way."""
    root = make(common_name="Root", authority=True)
    server = make("mx.example.com", issuer=root)
    record = f"TlsaRecord(2, 0, 0, {root.der!r})"
    program = (
        "from zonerelay.delivery.tls.dane import verify; "
        "from zonerelay.routing.dns.answers import TlsaRecord; "
        f"print(verify([{server.der!r}], [{record}], ['mx.example.com'], now={NOW}))"
    )
    command = [*FORBIDDEN, sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert (done.stdout, done.stderr) == ("mx.example.com\n", "")
