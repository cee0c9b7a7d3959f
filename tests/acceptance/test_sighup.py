"""SIGHUP to a real relay: TLS and AUTH switched on in a running one, and a mistake that changes nothing."""

from __future__ import annotations

import signal
import smtplib
import subprocess
import time
from pathlib import Path

from tests.support.certificates import DAY, make
from tests.support.credentials import file_of, user
from tests.support.ports import LOOPBACK
from tests.support.process import PROGRAM, RelayProcess
from tests.support.tls_client import trusting


def edit(relay: RelayProcess, old: str, new: str) -> None:
    text = relay.config.read_text()
    assert text.count(old) == 1
    relay.config.write_text(text.replace(old, new))
    relay.signal(signal.SIGHUP)


def status(relay: RelayProcess) -> str:
    command = [str(PROGRAM), "status", "--config", str(relay.config)]
    return subprocess.run(command, capture_output=True, check=True, timeout=30).stdout.decode()


def test_tls_and_auth_are_switched_on_in_a_running_relay(tmp_path: Path) -> None:
    made = make("relay.test", starts=time.time() - DAY, ends=time.time() + 90 * DAY)
    certificate, key = made.write(tmp_path, "relay")
    users = tmp_path / "users"
    users.write_text(file_of(user()))
    with (
        RelayProcess(tmp_path / "relay", next_hop="127.0.0.1:1", listener={"max_errors": 19}) as relay,
        smtplib.SMTP(LOOPBACK, relay.smtp_port, timeout=10) as open_one,
    ):
        open_one.ehlo()
        assert not open_one.has_extn("starttls")
        tls = f'tls = "starttls"\ncertificate = "{certificate}"\nkey = "{key}"\nauth = "required"'
        edit(relay, "max_errors = 19", tls)
        relay.wait_for(lambda: relay.events("certificate-loaded") != [], what="certificate-loaded")
        relay.wait_for(lambda: relay.events("reloaded") != [], what="reloaded")
        edit(relay, "[admin]", f'[auth]\ncredentials = "{users}"\n\n[admin]')
        relay.wait_for(lambda: len(relay.events("reloaded")) == 2, what="reloaded")

        open_one.sendmail("app@example.org", ["b@example.com"], b"Subject: x\r\n\r\nx\r\n")
        with smtplib.SMTP(LOOPBACK, relay.smtp_port, timeout=10) as client:
            client.starttls(context=trusting())
            assert client.login("app", "correct horse")[0] == 235
            client.sendmail("app@example.org", ["b@example.com"], b"Subject: x\r\n\r\nx\r\n")

        edit(relay, str(certificate), str(tmp_path / "none.pem"))
        relay.wait_for(lambda: relay.events("reload-incomplete") != [], what="reload-incomplete")
        assert "none.pem does not exist" in status(relay)
        edit(relay, "required", "requierd")
        relay.wait_for(lambda: relay.events("reload-refused") != [], what="reload-refused")
        assert "did you mean required?" in " ".join(status(relay).split())
        with smtplib.SMTP(LOOPBACK, relay.smtp_port, timeout=10) as client:
            client.starttls(context=trusting())
            assert client.login("app", "correct horse")[0] == 235
        assert relay.events("trouble") == []
