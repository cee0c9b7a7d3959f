"""docs/send/applications.md: each recipe sends, and does in trouble what the page's table says of it."""

import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.acceptance.submission import PASSWORD, Papers
from tests.support.applications import CLIENTS, PAGE, USER, Client, Sending
from tests.support.cutter import Cutter
from tests.support.ports import LOOPBACK, free_ports, wait_until
from tests.support.process import PROGRAM, RelayProcess
from tests.support.senders import Result
from tests.support.sink import Sink

WORDS = "Ask postmaster@example.org"
RULES = (
    {"recipient": ["defer-*@example.com"], "action": "defer", "reply": f"451 4.7.1 {WORDS}"},
    {"recipient": ["refuse-*@example.com"], "action": "refuse", "reply": f"550 5.7.1 {WORDS}"},
)


def table() -> dict[str, list[str]]:
    """What the page says, by client."""
    rows = re.findall(r"^\| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: cells for name, *cells in (row.split(" | ") for row in rows) if name in CLIENTS}


@dataclass(frozen=True)
class House:
    """A relay with two doors: `wire` leads to the open one, `tls` asks for a log-in."""

    relay: RelayProcess
    wire: Cutter
    tls: int
    sink: int


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, papers: Papers) -> Iterator[House]:
    directory = tmp_path_factory.mktemp("relay")
    users = directory / "users"
    add = [str(PROGRAM), "user", "add", USER, "--file", str(users), "--password-stdin"]
    subprocess.run(add, input=PASSWORD.encode(), capture_output=True, timeout=60, check=True)
    tls, sink = free_ports(2)
    door = {"tls": "starttls", "certificate": str(papers.server), "auth": "required", "allow_networks": []}
    relay = RelayProcess(
        directory,
        next_hop=f"{LOOPBACK}:{sink}",
        more_listeners=[{"address": f"{LOOPBACK}:{tls}", **door}],
        tables={"auth": {"credentials": str(users)}, "access": RULES},
    )
    with relay, Cutter(relay.smtp_port) as wire:
        yield House(relay, wire, tls, sink)


class Trial:
    """One client, its runs, and what the page's row of it has to be."""

    def __init__(self, client: Client, house: House, papers: Papers, directory: Path) -> None:
        self._client, self._house, self._papers, self._directory = client, house, papers, directory
        self._slug = re.sub(r"\W+", "", client.title.lower())
        self._runs = 0

    def address(self, kind: str) -> str:
        return f"{kind}-{self._slug}@example.com"

    def clear(self, *kinds: str, key: str = "") -> Result:
        return self._run(*kinds, key=key, port=self._house.wire.port)

    def secure(self, kind: str, *, trusted: bool) -> Result:
        ca = self._papers.ca if trusted else None
        return self._run(kind, port=self._house.tls, password=PASSWORD, ca=ca)

    def _run(
        self, *kinds: str, port: int, key: str = "", password: str = "", ca: Path | None = None
    ) -> Result:
        self._runs += 1
        directory = self._directory / str(self._runs)
        directory.mkdir()
        return self._client.send(
            Sending(
                recipients=[self.address(kind) for kind in kinds],
                port=port,
                directory=directory,
                key=key or f"{self._slug}-{self._runs}",
                password=password,
                ca=ca,
            )
        )

    def cell(self, result: Result, *, refused: bool = True) -> str:
        """The error of a client, which contains the relay's reply if mail was refused."""
        error = self._client.failure(result)
        assert (WORDS in result.transcript) == (refused and bool(error)), result.transcript
        return error or "no error"

    def once(self, kind: str) -> None:
        """Fails if the client has tried again by itself."""
        sessions, address = self._house.wire.sessions, self.address(kind)
        assert wait_until(lambda: sessions[address] > 0, timeout=20)
        assert sessions[address] == 1


def story(trial: Trial, client: Client, house: House) -> dict[str, Result]:
    """Every run; returns when whatever was accepted has been delivered."""
    results = {"plain": trial.clear("plain")}
    if client.can_tls:
        results["tls"] = trial.secure("tls", trusted=True)
        results["untrusted"] = trial.secure("untrusted", trusted=False)
    for kind in ("defer", "refuse"):
        results[kind] = trial.clear(kind)
        trial.once(kind)
    results["two"] = trial.clear("other", "refuse")
    house.wire.cuts.add(trial.address("lost"))
    results["lost"] = trial.clear("lost", key=f"{client.title.split()[0]}-4711")
    trial.once("lost")
    assert not house.wire.cuts
    if client.can_again:
        results["again"] = trial.clear("lost", key=f"{client.title.split()[0]}-4711")
    house.relay.wait_until_empty()
    return results


@pytest.mark.parametrize("title", CLIENTS)
def test_a_recipe_sends_and_its_troubles_are_as_the_page_says(
    title: str, house: House, papers: Papers, tmp_path: Path
) -> None:
    if title == "cron" and os.geteuid() != 0:
        pytest.skip("needs root: cron becomes the users of its jobs")
    client = CLIENTS[title]()
    trial = Trial(client, house, papers, tmp_path)
    with Sink(port=house.sink) as sink:
        results = story(trial, client, house)

    copies = Counter(recipient for each in sink.messages for recipient in each.recipients)
    for kind in ("plain", "tls") if client.can_tls else ("plain",):
        assert results[kind].code == 0, results[kind].transcript
        [message] = [each for each in sink.messages if each.recipients == (trial.address(kind),)]
        header, _, body = message.body.partition(b"\r\n\r\n")
        assert f"\r\nSubject: {client.subject}".encode() in header
        assert f"\r\nTo: {trial.address(kind)}\r\n".encode() in b"%s\r\n" % header
        assert b"idempotency-key" not in header.lower()
        assert body.rstrip() == b"It is on its way."
        assert (b"with ESMTPSA" in header or b"with UTF8SMTPSA" in header) == (kind == "tls")
    assert not copies[trial.address("defer")] + copies[trial.address("refuse")]

    two = "the other gets it" if copies[trial.address("other")] else "nothing is sent"
    lost = copies[trial.address("lost")]
    observed = [
        trial.cell(results["defer"]),
        trial.cell(results["refuse"]),
        f"{trial.cell(results['two'])}; {two}",
        trial.cell(results["lost"], refused=False),
        "never" if not client.can_again else "1 copy" if lost == 1 else f"{lost} copies",
        "no TLS" if not client.can_tls else "sent" if copies[trial.address("untrusted")] else "not sent",
    ]
    assert lost > 0
    assert table().get(title) == observed, " | ".join((title, *observed))
    assert PASSWORD not in "".join(result.transcript for result in results.values())
