"""The examples of docs/send/listener.md with a real HAProxy and nginx; only addresses and files differ."""

import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.submission import PASSWORD, USER, Papers, add_user
from tests.support.debian import UnpackedPackage, ready_package
from tests.support.ports import LOOPBACK, accepts, free_ports, greets
from tests.support.process import RelayProcess
from tests.support.senders import Server, Swaks, Tls
from tests.support.servers import running_server
from tests.support.toml import Table

PAGE = (Path(__file__).parents[2] / "docs" / "send" / "listener.md").read_text()
CLIENT = "127.0.0.5"


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.+?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def block(text: str, language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.+?)^```", text, re.MULTILINE | re.DOTALL)
    return str(found)


def replaced(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def listener(text: str, address: str, papers: Papers | None = None, **changes: object) -> dict[str, Any]:
    """The page's listener for this machine."""
    (found,) = tomllib.loads(text)["listener"]
    files = {} if papers is None else {"certificate": str(papers.server), "key": str(papers.server)}
    return {**found, "address": address, **files, **changes}


@contextmanager
def relay(directory: Path, table: dict[str, Any]) -> Iterator[RelayProcess]:
    tables: dict[str, Table] = {"auth": {"credentials": str(add_user(directory))}, "log": {"redact": False}}
    with RelayProcess(
        directory / "relay", next_hop=f"{LOOPBACK}:1", more_listeners=[table], tables=tables
    ) as running:
        yield running
        assert running.events("trouble") == []


def serving(
    command: Sequence[object], log: Path, package: UnpackedPackage, port: int
) -> AbstractContextManager[object]:
    environment = {"LD_LIBRARY_PATH": package.library_path()}
    return running_server(command, log, lambda: accepts(port), environment=environment)


def check_log_ins(relay: RelayProcess, port: int, papers: Papers) -> None:
    """Who logs in may send; the relay knows the client by its own address, also when it fails."""
    swaks = Swaks()
    server = Server(port=port, tls=Tls.IMPLICIT, ca=papers.ca, user=USER, password=PASSWORD)
    from_client = ("--local-interface", CLIENT)
    sent = swaks.send(server, b"Subject: x\n\nhello\n", *from_client)
    assert sent.code == 0, sent.transcript
    relay.wait_for(lambda: relay.events("accepted") != [], what="accepted")  # lines are written in pieces
    (accepted,) = relay.events("accepted")
    assert (accepted["client"], accepted["user"]) == (CLIENT, USER)
    wrong = Server(port=port, tls=Tls.IMPLICIT, ca=papers.ca, user=USER, password="wrong")
    assert swaks.send(wrong, b"Subject: x\n\nhello\n", *from_client).said("535 5.7.8")
    relay.wait_for(lambda: relay.events("login-failed") != [], what="login-failed")
    assert {event["client"] for event in relay.events("login-failed")} == {CLIENT}
    nobody = Server(port=port, tls=Tls.IMPLICIT, ca=papers.ca)
    assert swaks.send(nobody, b"Subject: x\n\nhello\n", *from_client).code != 0
    assert len(relay.events("accepted")) == 1


@pytest.fixture
def papers(tmp_path: Path) -> Papers:
    return Papers.make(tmp_path)


def test_haproxy_as_the_page_has_it(tmp_path: Path, papers: Papers) -> None:
    package = ready_package("haproxy", "usr/sbin/haproxy")
    text = section("Behind HAProxy")
    inner, outer = free_ports(2)
    table = listener(block(text, "toml"), f"{LOOPBACK}:{inner}", papers, proxy_networks=[LOOPBACK])
    with relay(tmp_path, table) as behind:
        configuration = re.sub(r"^.*relay2.*\n", "", block(text, "haproxy"), flags=re.MULTILINE)
        changes = {
            "bind :465": f"bind {LOOPBACK}:{outer}",
            "10.0.0.11:4650": f"{LOOPBACK}:{inner}",
            "check port 8025": f"check port {behind.admin_port} inter 200ms",
        }
        file = tmp_path / "haproxy.cfg"
        file.write_text(replaced(configuration, changes))
        command = [str(package.path("usr/sbin/haproxy")), "-db", "-f", str(file)]
        log = tmp_path / "haproxy.log"
        with serving(command, log, package, outer):
            check_log_ins(behind, outer, papers)
        assert behind.terminate() == 0
        # The checks ask /readyz, and are nothing that the listener hears of.
        reasons = [event["reason"] for event in behind.events("refused") if event["reason"] != "auth"]
        assert reasons == ["auth-needed"]


def test_nginx_as_the_page_has_it(tmp_path: Path, papers: Papers) -> None:
    package = UnpackedPackage("nginx", also=["libnginx-mod-mail"])
    module = "usr/lib/nginx/modules/ngx_mail_module.so"
    package.ensure(["usr/sbin/nginx", module])
    text = section("Behind nginx")
    inner, outer, question = free_ports(3)
    folders = "".join(
        f" {each}_temp_path {tmp_path}/{each};"
        for each in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    changes = {
        "modules/ngx_mail_module.so": str(package.path(module)),
        "listen 465 ssl": f"listen {LOOPBACK}:{outer} ssl",
        "/etc/nginx/tls/fullchain.pem": str(papers.server),
        "/etc/nginx/tls/privkey.pem": str(papers.server),
        "127.0.0.1:8126": f"{LOOPBACK}:{question}",
        "Auth-Port 2526": f"Auth-Port {inner}",
        "http {": f"http {{ access_log off;{folders}",
    }
    file, log = tmp_path / "nginx.conf", tmp_path / "nginx.log"
    here = f"daemon off; master_process off; pid {tmp_path}/nginx.pid; error_log {log};\n"
    file.write_text(here + replaced(block(text, "nginx"), changes))
    command = [str(package.path("usr/sbin/nginx")), "-e", str(log), "-c", str(file)]
    table = listener(block(text, "toml"), f"{LOOPBACK}:{inner}")
    with relay(tmp_path, table) as behind, serving(command, log, package, outer):
        check_log_ins(behind, outer, papers)
        assert greets(inner)
