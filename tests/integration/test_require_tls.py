"""A message that demands TLS (RFC 8689) waits alone in a whole relay, and its report has the wish."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.integration.delivery.test_tls_levels import AUTHORITY, HOST, RIGHT
from tests.support.dns import FakeDns
from tests.support.relay import LOOPBACK, relay_with, settings
from tests.support.sink import Sink
from tests.support.sink_conversation import Manners
from tests.support.wishes import Report, put, to
from zonerelay.config.settings import RouteSettings, ZoneSettings
from zonerelay.model.envelope import Ret


async def test_it_waits_alone_and_its_report_leaves_by_verified_tls_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "authority.pem").write_bytes(AUTHORITY.pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
    clear, sender = Sink(), Sink()
    async with AsyncExitStack() as stack:
        for sink in (clear, sender):
            await sink.start()
            stack.push_async_callback(sink.close)
        dns = await stack.enter_async_context(FakeDns({HOST: {"A": [LOOPBACK]}}))
        zones = [
            ZoneSettings(next_hop=f"{LOOPBACK}:{clear.port}", max_age=2.0),
            ZoneSettings(name="reports", next_hop=f"[{HOST}]:{sender.port}"),
        ]
        routes = [RouteSettings(zone="reports", recipient_domain=("example.org",))]
        chosen = settings(tmp_path, zone=zones, route=routes, dns=dns.address)
        running = await stack.enter_async_context(relay_with(chosen))
        secret = await put(running, [to("b@example.com")], ret=Ret.FULL, require_tls=True)
        deferred = await running.until_logged("deferred", 2)
        assert {each["id"] for each in deferred} == {secret}
        assert str(deferred[0]["reply"]).startswith("451 4.7.30 ")
        assert not running.log.named("suspended")
        await put(running, [to("c@example.com")])
        (plain,) = await clear.wait_for(1)
        assert (plain.recipients, plain.tls) == (("c@example.com",), False)

        def report_waits() -> bool:
            waiting = [each for each in running.log.named("deferred") if each["id"] != secret]
            return any("4.7.30" in str(each["reply"]) for each in waiting)

        await running.until(report_waits, what="the report waits for TLS")
        assert not sender.messages
        sender.manners = Manners(tls=RIGHT.server_context())
        (dsn,) = await sender.wait_for(1)
        assert (dsn.tls, dsn.mail_from) == (True, "")
        report = Report(dsn.body)
        assert report.recipients[0]["Status"] == "4.7.30"
        assert report.returned.get_content_type() == "text/rfc822-headers"
        assert b"The body." not in dsn.body
        await running.until_empty()
        assert len(clear.messages) == 1
