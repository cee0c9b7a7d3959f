"""An application demands TLS for one message over HTTP: three kinds of hosts, and a relay that is killed."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from tests.acceptance.test_http_api import Api, add_token
from tests.acceptance.test_http_submission import user_of, with_users
from tests.integration.delivery.test_tls_levels import AUTHORITY, certificate, showing
from tests.support.crew import run
from tests.support.dns import FakeDns
from tests.support.ports import free_port, wait_until
from tests.support.process import RelayProcess
from tests.support.sink import Sink
from tests.support.sink_conversation import Manners

RIGHT = showing(certificate("verified.example", "clear.example", issuer=AUTHORITY))
SELF_SIGNED = showing(certificate("selfsigned.example"))
HOSTS = {"verified": RIGHT, "selfsigned": SELF_SIGNED, "clear": Manners()}
FIELDS: dict[str, Any] = {"from": "app@sender.example", "subject": "x", "text": "hello"}


def hand_in(relay: RelayProcess) -> Api:
    """Hands in one message with the wish and one without it for each domain; returns an operator."""
    app = user_of(relay, "app")
    for domain in (*(f"{name}.example" for name in HOSTS), "two.example"):
        for wish in (True, False):
            to = f"{'wish' if wish else 'any'}@{domain}"
            reply = app("POST", "/v1/messages", {**FIELDS, "to": to, "require_tls": wish})
            assert reply.status == 202, reply.body
    return Api(relay, add_token(relay, "oscar", "operate"))


def waiting(operator: Api) -> dict[str, str]:
    """The last reply of what is in the queue, by recipient."""
    return {each["recipient"]: each["reply"] for each in operator.get("/v1/queue")["deliveries"]}


async def test_it_leaves_by_verified_tls_or_not_at_all(tmp_path: Path) -> None:
    port, sinks, zones = free_port(), dict[str, Sink](), dict[str, dict[str, list[str]]]()
    (tmp_path / "authority.pem").write_bytes(AUTHORITY.pem)
    async with AsyncExitStack() as stack:
        for number, (name, manners) in enumerate(HOSTS.items(), 2):
            sink = Sink(host=f"127.0.0.{number}", port=port, manners=manners)
            sinks[name] = await stack.enter_async_context(sink)
            zones[f"{name}.example"] = {"MX": [f"10 {name}.example"], "A": [f"127.0.0.{number}"]}
        zones["two.example"] = {"MX": ["10 clear.example", "20 verified.example"]}
        dns = await stack.enter_async_context(FakeDns(zones))
        relay = RelayProcess(
            tmp_path / "relay",
            zone={"tls": "opportunistic", "port": port, "allow_private_addresses": True},
            tables={"dns": {"servers": [dns.address]}, "retry": {"schedule": ["1h"]}},
            environment={"SSL_CERT_FILE": str(tmp_path / "authority.pem")},
        )
        stack.callback(relay.kill)
        await asyncio.to_thread(with_users(relay).start)
        operator = await asyncio.to_thread(hand_in, relay)
        await sinks["verified"].wait_for(3)
        await sinks["selfsigned"].wait_for(1)
        await sinks["clear"].wait_for(2)
        stuck = {"wish@selfsigned.example", "wish@clear.example"}

        def settled() -> bool:
            found = waiting(operator)
            return found.keys() == stuck and all("4.7.30" in reply for reply in found.values())

        assert await asyncio.to_thread(wait_until, settled, timeout=10.0)
        sinks["clear"].manners = RIGHT
        await asyncio.to_thread(relay.restart)
        retried = await asyncio.to_thread(run, relay, "queue", "retry", "--all", "--yes")
        assert retried.returncode == 0, retried.stderr
        await sinks["clear"].wait_for(3)
        taken = {
            name: sorted((each.recipients[0], each.tls) for each in sink.messages)
            for name, sink in sinks.items()
        }
        assert taken == {
            "verified": [
                ("any@verified.example", True),
                ("wish@two.example", True),
                ("wish@verified.example", True),
            ],
            "selfsigned": [("any@selfsigned.example", True)],
            "clear": [
                ("any@clear.example", False),
                ("any@two.example", False),
                ("wish@clear.example", True),
            ],
        }
