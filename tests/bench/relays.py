"""The relays behind one face: start on a free port towards given sinks, stop, and be measured."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.bench.client import PASSWORD, user_name
from tests.bench.load import Sink
from tests.bench.rows import MIB, POSTFIX, SENDER_DOMAIN, ZONERELAY, Row, Source, Tls, domain, sink_address
from tests.bench.spools import SPOOLS, SpoolStarter
from tests.support.certificates import DAY, make
from tests.support.meters import ProcessGroup
from tests.support.opendkim import signing_milter
from tests.support.ports import LOOPBACK, free_port
from tests.support.postfix import PostfixInstance, PostfixSettings, PostfixTools
from tests.support.process import PROGRAM, RelayProcess
from tests.support.toml import Table
from zonerelay.config.credentials import passwords
from zonerelay.config.credentials.file import User, format_line


@dataclass(frozen=True, slots=True)
class Papers:
    """`credentials` has each user with a hash as `zonerelay user` makes it, at full cost."""

    certificate: Path
    key: Path
    credentials: Path
    users: Sequence[str]


def make_papers(directory: Path, row: Row) -> Papers | None:
    """None for a row in clear text."""
    if row.tls is Tls.NONE:
        return None
    now = time.time()
    certificate, key = make("relay.test", starts=now - DAY, ends=now + 90 * DAY).write(directory, "relay")
    names = [user_name(number) for number in range(row.users)]
    credentials = directory / "credentials"
    lines = [format_line(User(name, passwords.make_hash(PASSWORD))) for name in names]
    credentials.write_text("".join(f"{line}\n" for line in lines))
    credentials.chmod(0o600)
    return Papers(certificate, key, credentials, names)


LIMITS: Mapping[str, str | int | list[str]] = {
    "max_connections_per_client": 1000,
    "max_message_size": "50 MB",
    "max_connections": 1000,
}


class Relay(Protocol):
    """A started relay."""

    @property
    def smtp_port(self) -> int: ...

    @property
    def pid(self) -> int: ...

    def log_tail(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Running:
    """`port` is where the row's mail goes."""

    relay: Relay
    port: int


# A directory for its files, the row, the sink's port, and what to put before its command line.
Starter = Callable[[Path, Row, int, Sequence[str]], AbstractContextManager[Running]]


def next_hops(row: Row, sink_port: int) -> dict[str, str]:
    """Host and port per domain when a row spreads them; empty otherwise."""
    if not row.spread:
        return {}
    return {domain(number): f"{sink_address(number)}:{sink_port}" for number in range(row.domains)}


def zonerelay_starter(
    *,
    environment: Mapping[str, str] | None = None,
    spool: SpoolStarter = SPOOLS["leveldb"],
    workers: int = 1,
    program: Path = PROGRAM,
) -> Starter:
    """Limits that the row's sessions cannot reach; otherwise the defaults."""

    @contextlib.contextmanager
    def start(directory: Path, row: Row, sink_port: int, launcher: Sequence[str]) -> Iterator[Running]:
        papers = make_papers(directory, row)
        listener = {**LIMITS, **_security(row, papers)}
        implicit = free_port() if row.tls is Tls.IMPLICIT else 0
        with (
            spool(launcher) as server,
            RelayProcess(
                directory,
                top={"workers": workers},
                spool=server.tables["spool"],
                # One in clear text is always there, to see when the relay is ready.
                listener=LIMITS if implicit else listener,
                more_listeners=[{"address": f"{LOOPBACK}:{implicit}", **listener}] if implicit else [],
                tables={
                    **_tables(row, sink_port, papers),
                    **_signing(directory, ("rsa",) * row.signed),
                    **{name: table for name, table in server.tables.items() if name != "spool"},
                },
                launcher=launcher,
                environment=environment,
                program=program,
            ) as relay,
        ):
            yield Running(relay, implicit or relay.smtp_port)

    return start


def _signing(directory: Path, algorithms: Sequence[str]) -> dict[str, Table | Sequence[Table]]:
    """A new key for each algorithm, for the sender of the load."""
    entries: list[Table] = []
    for algorithm in algorithms:
        file = directory / f"{algorithm}.pem"
        command = ["dkim", "new", "--domain", SENDER_DOMAIN, "--selector", algorithm]
        subprocess.run(
            [str(PROGRAM), *command, "--algorithm", algorithm, "--out", str(file)],
            check=True,
            capture_output=True,
            timeout=60,
        )
        entries.append({"domain": SENDER_DOMAIN, "selector": algorithm, "key_file": str(file)})
    return {"dkim": entries} if entries else {}


def _security(row: Row, papers: Papers | None) -> dict[str, str | int | list[str]]:
    if papers is None:
        return {}
    auth = "optional" if row.users else "off"
    return {
        "tls": row.tls.value,
        "certificate": str(papers.certificate),
        "key": str(papers.key),
        "auth": auth,
    }


def _tables(row: Row, sink_port: int, papers: Papers | None) -> dict[str, Table | Sequence[Table]]:
    limits: Table = {
        "tls": "required" if row.source is Source.SECURE else "none",
        "allow_private_addresses": True,
        "max_connections": row.connections_out,
        "max_connections_per_destination": row.connections_out,
    }
    hops = next_hops(row, sink_port)
    zones: list[Table] = [{"name": name, "next_hop": hop, **limits} for name, hop in hops.items()]
    routes: list[Table] = [{"recipient_domain": [name], "zone": name} for name in hops]
    default: Table = {"name": "default", "next_hop": f"{LOOPBACK}:{sink_port}", **limits}
    tables: dict[str, Table | Sequence[Table]] = {"zone": [default, *zones], "route": routes}
    if papers is not None and papers.users:
        tables["auth"] = {"credentials": str(papers.credentials)}
    return tables


def tree_starter(tree: Path) -> Starter:
    """zonerelay from another source tree, run by the Python and the libraries of its `.venv`, or else by
    those of this one. Raises ValueError.
    """
    own = tree / ".venv/bin/zonerelay"
    if own.exists():
        return zonerelay_starter(program=own)
    environment = {"PYTHONPATH": str(tree)}
    # -P: without it the current directory would be searched before the tree.
    command = [sys.executable, "-P", "-c", "import zonerelay; print(zonerelay.__file__)"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    if not Path(found.stdout.strip()).is_relative_to(tree):
        raise ValueError(f"{tree} is not where zonerelay comes from then, but {found.stdout.strip()}")
    return zonerelay_starter(environment=environment)


def postfix_starter(tools: PostfixTools) -> Starter:
    """A process for each of the row's sessions where it has more than Postfix's default."""

    @contextlib.contextmanager
    def start(directory: Path, row: Row, sink_port: int, launcher: Sequence[str]) -> Iterator[Running]:
        bracketed = {name: f"[{hop.replace(':', ']:')}" for name, hop in next_hops(row, sink_port).items()}
        papers = make_papers(directory, row)
        settings = PostfixSettings(
            next_hop=f"[{LOOPBACK}]:{sink_port}",
            transports=bracketed,
            connections_out=row.connections_out,
            message_size_limit=50 * MIB,
            certificate=papers.certificate if papers else None,
            key=papers.key if papers else None,
            users=dict.fromkeys(papers.users, PASSWORD) if papers else {},
            next_hop_tls="encrypt" if row.source is Source.SECURE else "",
            milter=str(directory / "opendkim.sock") if row.signed else "",
        )
        with (
            _opendkim(directory, launcher) if row.signed else contextlib.nullcontext(),
            PostfixInstance(tools, directory, settings, launcher=launcher) as relay,
        ):
            yield Running(relay, relay.smtps_port if row.tls is Tls.IMPLICIT else relay.smtp_port)

    return start


@contextlib.contextmanager
def _opendkim(directory: Path, launcher: Sequence[str]) -> Iterator[None]:
    """OpenDKIM as a milter that signs with a new key of RSA-2048; its CPU is the relay's."""
    key = _signing(directory, ("rsa",))["dkim"][0]["key_file"]  # type: ignore[index, call-overload]
    with signing_milter(
        directory, domain=SENDER_DOMAIN, selector="rsa", key=Path(str(key)), launcher=launcher
    ):
        yield


def starters(tools: PostfixTools) -> dict[str, Starter]:
    """Every relay that a row may name."""
    return {ZONERELAY: zonerelay_starter(), POSTFIX: postfix_starter(tools)}


@dataclass(frozen=True, slots=True)
class Subject:
    """One running relay while a row is measured."""

    name: str
    relay: Relay
    port: int
    group: ProcessGroup
    sink_port: int
    sink: Sink | None  # None: the probe brings its own
