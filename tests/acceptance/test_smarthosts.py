"""Logging in at a real smarthost: Postfix with Cyrus SASL."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.acceptance.submission import Papers
from tests.support.ports import LOOPBACK, free_ports, wait_until
from tests.support.postfix import REALM, PostfixInstance, PostfixSettings, PostfixTools
from tests.support.process import RelayProcess
from tests.support.senders import Tls
from tests.support.sink import Sink
from tests.support.toml import Value

SECRET = "pencil, and a comma="
POSTFIX_USER = f"relay@{REALM}"


def smarthost_relay(
    directory: Path, papers: Papers, *, port: int, tls: Tls, credential: Mapping[str, Value], password: str
) -> RelayProcess:
    directory.mkdir()
    file = directory / "password"
    file.write_text(f"{password}\n")
    file.chmod(0o600)
    return RelayProcess(
        directory,
        next_hop=f"{LOOPBACK}:{port}",
        zone={"tls": "verify", "tls_on_connect": tls is Tls.IMPLICIT, "credentials": ["main"]},
        tables={
            "credential": [{"name": "main", "password": str(file), **credential}],
            "retry": {"schedule": ["1s"], "suspend_min": "1s", "suspend_max": "1s"},
        },
        environment={"SSL_CERT_FILE": str(papers.ca)},
    )


@dataclass
class Cyrus:
    """A Postfix that asks Cyrus SASL, and where it sends what it takes."""

    postfix: PostfixInstance
    sink_port: int


@pytest.fixture(scope="module")
def cyrus(
    tmp_path_factory: pytest.TempPathFactory, papers: Papers, postfix_tools: PostfixTools
) -> Iterator[Cyrus]:
    directory = tmp_path_factory.mktemp("cyrus")
    for folder in (*directory.parents, directory):
        if folder != Path("/") and folder.stat().st_mode & 0o001 == 0:
            folder.chmod(0o711)
    (port,) = free_ports(1)
    settings = PostfixSettings(
        next_hop=f"[{LOOPBACK}]:{port}",
        certificate=papers.server,
        users={"relay": SECRET},
        mechanisms="PLAIN LOGIN SCRAM-SHA-1 SCRAM-SHA-256",
        users_only=True,
    )
    with PostfixInstance(postfix_tools, directory / "postfix", settings) as postfix:
        yield Cyrus(postfix, port)


@pytest.mark.parametrize(
    ("mechanism", "tls"),
    [
        ("scram-sha-256", Tls.STARTTLS),
        ("scram-sha-1", Tls.STARTTLS),
        ("plain", Tls.IMPLICIT),
        ("login", Tls.STARTTLS),
        ("auto", Tls.IMPLICIT),
    ],
)
def test_postfix_lets_us_in(tmp_path: Path, papers: Papers, cyrus: Cyrus, mechanism: str, tls: Tls) -> None:
    postfix = cyrus.postfix
    before = len(postfix.log_text())
    with (
        Sink(port=cyrus.sink_port) as sink,
        smarthost_relay(
            tmp_path / "relay",
            papers,
            port=postfix.smtps_port if tls is Tls.IMPLICIT else postfix.smtp_port,
            tls=tls,
            credential={"user": POSTFIX_USER, "mechanism": mechanism},
            password=SECRET,
        ) as relay,
    ):
        relay.send("b@example.com")
        sink.until(1)
    used = "SCRAM-SHA-256" if mechanism == "auto" else mechanism.upper()
    said = f"sasl_method={used}, sasl_username={POSTFIX_USER}"
    noted = wait_until(lambda: said in postfix.log_text()[before:], timeout=20)
    assert noted, postfix.log_text()[before:]
