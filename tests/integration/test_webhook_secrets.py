"""The secret of a webhook is read before each post, so a new one needs no restart and no signal."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from standardwebhooks import Webhook

from tests.support.webhooks import Receiver
from zonerelay.config.settings import WebhookSettings
from zonerelay.config.tables.store import webhook_keys
from zonerelay.model.clock import SystemClock
from zonerelay.webhook.endpoint import Endpoint


async def test_a_secret_that_was_replaced_signs_the_next_event(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with Receiver() as receiver:
        settings = WebhookSettings(name="hook", url=receiver.url(), secret=str(file), private=True)
        endpoint = Endpoint(settings, SystemClock(), partial(webhook_keys, settings, {}))
        for secret in ("whsec_" + "A" * 32, "whsec_" + "B" * 32):
            file.write_text(secret)
            assert (await endpoint.post("msg_1", b'{"type": "message.delivered"}')).ok
            post = receiver.taken()[-1]
            Webhook(secret).verify(post.body, post.headers)
        file.unlink()
        answer = await endpoint.post("msg_2", b"{}")
        assert not answer.ok
        assert "cannot be read" in answer.text
        await endpoint.poster.close()
