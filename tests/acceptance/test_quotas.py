"""Quotas are exact over workers that are killed and restarted, and over nodes on one Redis server."""

import json
import os
import signal
import smtplib
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.support.credentials import file_of, user
from tests.support.crew import QUICK, pid_of, relay_of, run
from tests.support.ports import LOOPBACK
from tests.support.process import RelayProcess
from tests.support.redis_server import shared_server
from tests.support.sink import Sink
from tests.support.toml import Table
from zonerelay.config.settings import UnsafeListener

MOST = 60
LISTENER: Table = {"auth": "optional", "unsafe": [UnsafeListener.CLEARTEXT_AUTH.value]}
MESSAGE = b"Subject: x\r\n\r\nhello\r\n"


def relay_with_users(directory: Path, sink_port: int, **more: Any) -> RelayProcess:
    directory.mkdir(exist_ok=True)
    credentials = directory / "credentials"
    credentials.write_text(file_of(user("shop")))
    tables = {**QUICK, "auth": {"credentials": str(credentials)}, **more.pop("tables", {})}
    relay = relay_of(directory, sink_port, listener=LISTENER, tables=tables, **more)
    quotas = run(relay, "user", "set", "shop", f"messages_per_day={MOST}", "recipients_per_hour=1000")
    assert quotas.returncode == 0, quotas.stderr
    return relay


def submit(ports: Sequence[int], clients: int = 4) -> Counter[str]:
    """Each client logs in anew for each message, until it is told that the quota is used up."""

    def work(number: int) -> Counter[str]:
        told: Counter[str] = Counter()
        for turn in range(20 * MOST):
            try:
                with smtplib.SMTP(LOOPBACK, ports[(number + turn) % len(ports)], timeout=20) as client:
                    client.login("shop", "correct horse")
                    client.sendmail("a@example.org", ["b@example.com"], MESSAGE)
                told["accepted"] += 1
            except (smtplib.SMTPSenderRefused, smtplib.SMTPDataError) as error:
                text = error.smtp_error
                told[f"{error.smtp_code} {str(text, 'ascii')[:44] if isinstance(text, bytes) else text}"] += 1
                if error.smtp_code == 452:
                    return told
            except (smtplib.SMTPException, OSError) as error:
                told[type(error).__name__] += 1
                time.sleep(0.05)
        return told

    with ThreadPoolExecutor(clients) as threads:
        return sum(threads.map(work, range(clients)), Counter())


def test_two_workers_of_which_one_is_killed_have_one_quota(tmp_path: Path, sink: Sink) -> None:
    with relay_with_users(tmp_path, sink.port) as relay:
        with ThreadPoolExecutor(1) as thread:
            sending = thread.submit(submit, [relay.smtp_port])
            relay.wait_for(lambda: len(relay.events("accepted")) >= 10, what="mail")
            os.kill(pid_of(relay, 1), signal.SIGKILL)
            told = sending.result()
        # A message counts before it is stored: one that the kill has cut off in between is counted, not sent.
        assert MOST - 4 <= told["accepted"] <= MOST, told
        assert told["452 4.7.1 Limit of 60 messages per day reached, "] == 4
        workers = {event["id"][-2:] for event in relay.events("accepted")}
        assert workers == {"00", "01"}, "both took mail"
        (near,) = relay.events("quota-near")
        assert (near["quota"], near["used"], near["most"]) == ("messages_per_day", 48, MOST)
        shown = json.loads(run(relay, "user", "show", "shop", "--json").stdout)
        assert shown["usage"]["messages_per_day"] == MOST
        status = run(relay, "status").stdout
        assert any(line.split() == ["shop", "messages_per_day", "60", "60"] for line in status.splitlines())
        assert relay.metric("zonerelay_user_quota_used_ratio", user="shop") == 1
        relay.restart()
        assert submit([relay.smtp_port], 1)["accepted"] == 0
        assert run(relay, "user", "set", "shop", f"messages_per_day={MOST + 3}").returncode == 0
        assert submit([relay.smtp_port], 1)["accepted"] == 3


def test_nodes_on_one_redis_server_have_one_quota(tmp_path: Path, sink: Sink) -> None:
    server = shared_server()
    spool: Table = {"backend": "redis"}
    tables = {"redis": {"url": server.url, "prefix": f"quota{os.getpid()}:"}}
    with (
        relay_with_users(tmp_path / "one", sink.port, spool=spool, workers=1, tables=tables) as one,
        relay_with_users(tmp_path / "two", sink.port, spool=spool, workers=1, tables=tables) as two,
    ):
        told = submit([one.smtp_port, two.smtp_port])
        assert told == {"accepted": MOST, "452 4.7.1 Limit of 60 messages per day reached, ": 4}
        assert one.events("accepted")
        assert two.events("accepted")
        shown = json.loads(run(two, "user", "show", "shop", "--json").stdout)
        assert (shown["usage"]["messages_per_day"], shown["usage_unknown"]) == (MOST, "")
