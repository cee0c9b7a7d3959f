"""A relay as a mail provider runs one: port 25, port 587 with STARTTLS, port 465 with TLS from the start.

Certificates come from a CA of this test run, users from `zonerelay user add`, and everything is delivered to
a sink. What is logged never holds the password: `Submission` looks when it ends.
"""

import hashlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from ssl import PEM_cert_to_DER_cert

import trustme

from tests.support.ports import LOOPBACK, free_ports
from tests.support.process import PROGRAM, RelayProcess
from tests.support.senders import Server, Tls
from tests.support.sink import Sink
from tests.support.sink_conversation import Received
from tests.support.toml import Table

NAME = "relay.test"
USER = "alice"
PASSWORD = "correct-horse-9"


@dataclass(frozen=True)
class Papers:
    """Files of a CA, of a server and of a client; and the client's fingerprint."""

    ca: Path
    server: Path
    client: Path
    fingerprint: str

    @classmethod
    def make(cls, directory: Path) -> "Papers":
        authority = trustme.CA()
        ca, server, client = (directory / name for name in ("ca.pem", "server.pem", "client.pem"))
        authority.cert_pem.write_to_path(ca)
        issued = authority.issue_cert(NAME, LOOPBACK)
        issued.private_key_and_cert_chain_pem.write_to_path(server)
        # Another authority's: the fingerprint counts, not who signed it.
        own = trustme.CA().issue_cert("client.test")
        own.private_key_and_cert_chain_pem.write_to_path(client)
        der = PEM_cert_to_DER_cert(own.cert_chain_pems[0].bytes().decode())
        return cls(ca, server, client, hashlib.sha256(der).hexdigest())


def add_user(directory: Path) -> Path:
    """A credentials file with one user, as an operator makes it."""
    file = directory / "credentials"
    subprocess.run(
        [str(PROGRAM), "user", "add", USER, "--file", str(file), "--password-stdin"],
        input=f"{PASSWORD}\n".encode(),
        check=True,
        capture_output=True,
        timeout=30,
    )
    return file


@dataclass(frozen=True)
class Submission:
    """The running relay and its doors: `open` trusts loopback, the others ask for a log-in over TLS."""

    relay: RelayProcess
    sink: Sink
    papers: Papers
    open: Server
    starttls: Server
    implicit: Server

    def door(self, tls: Tls) -> Server:
        return self.starttls if tls is Tls.STARTTLS else self.implicit

    def delivered(self) -> Received:
        """The one message that arrived."""
        (message,) = self.sink.until(1, timeout=30)
        self.relay.wait_until_empty()
        return message


def anonymous(server: Server) -> Server:
    return replace(server, user="", password="")


@contextmanager
def submission(directory: Path, sink: Sink, papers: Papers, credentials: Path) -> Iterator[Submission]:
    ports = free_ports(2)
    secured: Table = {"certificate": str(papers.server), "auth": "required", "allow_networks": []}
    kinds: tuple[Table, ...] = (
        {"tls": "starttls", "require_tls": True, "allow_certificates": [papers.fingerprint]},
        {"tls": "implicit"},
    )
    listeners = [
        {"address": f"{LOOPBACK}:{port}", **secured, **kind} for port, kind in zip(ports, kinds, strict=True)
    ]
    relay = RelayProcess(
        directory,
        next_hop=f"{LOOPBACK}:{sink.port}",
        more_listeners=listeners,
        tables={"auth": {"credentials": str(credentials)}},
    )
    starttls = Server(port=ports[0], tls=Tls.STARTTLS, ca=papers.ca, name=NAME, user=USER, password=PASSWORD)
    with relay:
        yield Submission(
            relay,
            sink,
            papers,
            open=Server(port=relay.smtp_port),
            starttls=starttls,
            implicit=replace(starttls, port=ports[1], tls=Tls.IMPLICIT),
        )
        assert PASSWORD not in relay.log_text()
        assert not relay.events("trouble")
