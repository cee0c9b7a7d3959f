"""Webhooks of a real relay: whatever it has stored is told, whatever the endpoint and kill -9 do."""

import asyncio
import base64
import email
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from standardwebhooks import Webhook

from tests.acceptance.test_http_submission import user_of, with_users
from tests.support.command import Shell
from tests.support.ports import LOOPBACK, wait_until
from tests.support.process import RelayProcess
from tests.support.sink import Sink
from tests.support.submit import Account, Submitter
from tests.support.toml import Table, toml_document
from tests.support.webhooks import Answer, Post, Receiver

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
OLD = "whsec_" + base64.b64encode(bytes(range(1, 33))).decode()
SEED = bytes(range(2, 34))
RETRY: Table = {"schedule": ["1s"], "jitter": 0, "suspend_min": "1s", "suspend_max": "2s"}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as running:
        yield running


def webhook(directory: Path, receiver: Receiver, path: str = "/hook", **options: Any) -> Table:
    directory.mkdir(exist_ok=True)
    secret = directory / "hook.secret"
    secret.write_text(f"{SECRET}\n")
    return {
        "name": path.strip("/"),
        "url": receiver.url(path),
        "secret": str(secret),
        "private": True,
        **options,
    }


def relay_with(
    directory: Path, sink: Sink, *webhooks: Table, workers: int = 1, backend: str = "leveldb"
) -> RelayProcess:
    return RelayProcess(
        directory,
        spool={"backend": backend},
        top={"workers": workers},
        next_hop=f"{LOOPBACK}:{sink.port}",
        tables={"retry": RETRY, **({"webhook": list(webhooks)} if webhooks else {})},
    )


def verified(post: Post, secret: str = SECRET) -> dict[str, Any]:
    return Webhook(secret).verify(post.body, post.headers)  # type: ignore[no-any-return]  # the library left it untyped


def posts_of(receiver: Receiver, count: int, path: str = "/hook", timeout: float = 60.0) -> list[Post]:
    assert wait_until(lambda: len(receiver.taken(path)) >= count, timeout=timeout), receiver.posts
    return receiver.taken(path)


def last(relay: RelayProcess) -> set[str]:
    return {relay.events("accepted")[-1]["id"]}


def test_events_can_be_matched_with_what_was_submitted(
    tmp_path: Path, sink: Sink, receiver: Receiver, zonerelay: Shell
) -> None:
    """Events had neither tags nor metadata, no Message-ID of the relay's own, and addresses in one text."""
    hook = webhook(tmp_path, receiver, addresses="clear")
    with with_users(relay_with(tmp_path, sink, hook)) as relay:
        app = user_of(relay, "app")
        given = {
            "from": "app@example.org",
            "to": ["bob@example.com", "reject-550@example.com"],
            "text": "hi",
            "tags": ["welcome", "eu"],
            "metadata": {"order": 4711, "paid": True, "name": "Zoë, <z@example.net>", "tag": "x=y"},
        }
        taken = app("POST", "/v1/messages", given).json
        own = [verified(post)["data"] for post in posts_of(receiver, 3)]
        own = [data for data in own if data["id"] == taken["id"]]
        relay.send("eve@example.com", message=b"Subject: no Message-ID\r\n\r\nx\r\n")

        def of_eve() -> list[dict[str, Any]]:
            found = [verified(post)["data"] for post in receiver.taken("/hook")]
            eve = {data["id"] for data in found if data.get("to") == ["eve@example.com"]}
            return [data for data in found if data["id"] in eve]

        assert wait_until(lambda: len(of_eve()) >= 2, timeout=60)
        metadata = {"order": "4711", "paid": "true", "name": "Zoë, <z@example.net>", "tag": "x=y"}
        for data in own:
            assert (data["message_id"], data["tags"]) == (taken["message_id"], ["welcome", "eu"]), data
            assert data["metadata"] == metadata
            assert "message-id" not in data
        assert [data["to"] for data in own if "to" in data] == [given["to"]]
        (arrived,) = (each for each in sink.messages if b"no Message-ID" in each.body)
        written = email.message_from_bytes(arrived.body)["Message-ID"]
        assert {data["message_id"] for data in of_eve()} == {written}
        assert all((data["tags"], data["metadata"]) == ([], {}) for data in of_eve())
        zonerelay.found(relay, "bob@example.com", "--outcome", "delivered")
        before = len(receiver.taken("/hook"))
        assert zonerelay(relay, "webhook", "replay", "hook", "--since", "1h").status == 0
        assert wait_until(lambda: len(receiver.taken("/hook")) > before + 4, timeout=60)
        again = [verified(post)["data"] for post in receiver.taken("/hook")[before:]]
        again = [data for data in again if data["id"] == taken["id"]]
        assert {tuple(data["tags"]) for data in again} == {("welcome", "eu")}
        assert all(set(data["metadata"]) == set(metadata) for data in again)


def test_outcomes_are_told_in_order(tmp_path: Path, sink: Sink, receiver: Receiver, zonerelay: Shell) -> None:
    told = webhook(tmp_path, receiver)
    clear = webhook(
        tmp_path,
        receiver,
        "/clear",
        url=receiver.url("/clear").replace("://", "://app:hunter2@"),
        addresses="clear",
        events=["message.accepted", "delivery.bounced"],
    )
    with relay_with(tmp_path, sink, told, clear) as relay:
        relay.send("bob@example.com", "greylist@example.com", "reject-550@example.com")
        # accepted, delivered, deferred, bounced, delivered, and the report's delivery
        posts = posts_of(receiver, 6)
        assert receiver.types() == {
            "message.accepted": 1,
            "delivery.delivered": 3,
            "delivery.deferred": 1,
            "delivery.bounced": 1,
        }
        events = [verified(post) for post in posts]
        assert len({post.id for post in posts}) == 6
        (message,) = (e["data"]["id"] for e in events if e["type"] == "message.accepted")
        mine = [event for event in events if event["data"]["id"] == message]
        assert mine[0]["type"] == "message.accepted", "first of all that is about the message"
        assert [event["type"] for event in mine][-1] == "delivery.delivered", "the greylisted one"
        (bounced,) = (event for event in mine if event["type"] == "delivery.bounced")
        assert bounced["data"]["reply"].startswith("550")
        assert bounced["data"]["sender"].startswith("u-")
        assert b"example.org" not in b"".join(post.body for post in posts)
        assert all(len(post.body) < 20_000 and b": " not in post.body[:30] for post in posts)

        accepted, bounced = (verified(post) for post in posts_of(receiver, 2, "/clear"))
        assert accepted["data"]["sender"] == "app@example.org"
        assert accepted["data"]["to"][0] == "bob@example.com"
        assert bounced["data"]["recipient"] == "reject-550@example.com"

        # Of the events themselves nothing is seen among mail.
        relay.wait_until_empty()
        listed = zonerelay(relay, "webhook", "list", "--json").rows
        assert [(row["name"], row["state"], row["queued"]) for row in listed] == [
            ("hook", "ok", 0),
            ("clear", "ok", 0),
        ]
        assert listed[1]["url"] == receiver.url("/clear").replace("://", "://***@")
        assert "HTTP 204" in zonerelay(relay, "webhook", "test", "hook").out
        assert receiver.types()["webhook.test"] == 1
        # The history has the same once more, marked as such.
        zonerelay.found(relay, "greylist@example.com", "--outcome", "delivered")
        before = len(receiver.taken())
        assert zonerelay(relay, "webhook", "replay", "hook", "--since", "1h").status == 0
        again = posts_of(receiver, before + 6)[before:]
        assert {post.event["data"]["replayed"] for post in again} == {True}
        assert zonerelay(relay, "webhook", "test", "nothing").status == 1


async def test_each_stored_outcome_outlives_kill_9(tmp_path: Path, sink: Sink, receiver: Receiver) -> None:
    chance = random.Random(7)
    account = Account()
    recipients = ("one@example.com", "two@example.net", "reject-550@example.com")
    # An endpoint that is not always there.
    flaky = webhook(tmp_path, receiver, max_queued=100_000)
    with relay_with(tmp_path, sink, flaky) as relay:
        for number in range(3):
            client = Submitter(relay.smtp_port, prefix=f"round{number}", recipients=recipients)
            load = asyncio.create_task(client.run(8, 120))
            receiver.answers["/hook"] = Answer(503 if number == 1 else 204)
            await asyncio.sleep(chance.uniform(0.3, 0.9))
            await asyncio.to_thread(relay.kill)
            await load
            account.add(client)
            receiver.answers["/hook"] = Answer()
            await asyncio.to_thread(relay.restart)
        ids = set(account.ids.values())
        assert len(ids) > 20, "a busy machine takes fewer"
        await asyncio.to_thread(relay.wait_until_empty)

        def missing() -> set[str]:
            ends = receiver.about("delivery.delivered") | receiver.about("delivery.bounced")
            return ids - (receiver.about("message.accepted") & ends)

        await asyncio.to_thread(wait_until, lambda: not missing(), timeout=60)
        assert not missing(), f"{len(missing())} of {len(ids)} were not told"
    # At least once, in order for each message: what tells of an end comes after the acceptance.
    first: dict[str, str] = {}
    for post in receiver.taken():
        verified(post)
        first.setdefault(post.event["data"]["id"], post.event["type"])
    dsns = {event["id"] for event in relay.events("dsn")}
    assert {kind for identity, kind in first.items() if identity in ids - dsns} == {"message.accepted"}


def test_an_endpoint_that_fails_holds_up_no_mail_and_gets_its_events_later(
    tmp_path: Path, sink: Sink, receiver: Receiver, zonerelay: Shell
) -> None:
    names = ("down", "slow", "gone", "moved", "hook")
    receiver.answers |= {
        "/down": Answer(503, {"Retry-After": "2"}),
        "/slow": Answer(delay=5),
        "/gone": Answer(410),
        "/moved": Answer(302, {"Location": receiver.url("/elsewhere")}),
    }
    told: dict[str, Any] = {"events": ["delivery.delivered"], "timeout": "2s"}
    hooks = [webhook(tmp_path, receiver, f"/{name}", **told) for name in names]
    with relay_with(tmp_path, sink, *hooks) as relay:
        for _ in range(20):
            relay.send("bob@example.com")
        posts_of(receiver, 20)
        assert len(sink.messages) == 20
        relay.wait_until_empty()

        def states() -> dict[str, str]:
            return {row["name"]: row["state"] for row in zonerelay(relay, "webhook", "list", "--json").rows}

        wanted = {"down": "failing", "slow": "failing", "gone": "disabled", "moved": "failing", "hook": "ok"}
        assert wait_until(lambda: states() == wanted, timeout=60), states()
        assert not [post for post in receiver.posts if post.path == "/elsewhere"]
        assert len([post for post in receiver.posts if post.path == "/gone"]) <= 4
        problems = zonerelay(relay, "status", "--json").out
        assert "webhook moved does not accept events: " in problems
        receiver.answers |= {"/down": Answer(), "/moved": Answer(), "/gone": Answer()}
        posts_of(receiver, 20, "/down")  # by itself
        assert zonerelay(relay, "webhook", "replay", "moved").status == 0
        posts_of(receiver, 20, "/moved")
        assert zonerelay(relay, "webhook", "replay", "gone").status == 0
        posts_of(receiver, 1, "/gone")
        relay.send("bob@example.com")
        assert wait_until(lambda: receiver.about("delivery.delivered", "/gone") >= last(relay), timeout=60)


def test_a_full_queue_loses_the_oldest_and_counts(tmp_path: Path, sink: Sink, receiver: Receiver) -> None:
    def story() -> None:
        receiver.answers["/hook"] = Answer(503)
        hook = webhook(tmp_path, receiver, events=["delivery.delivered"], max_queued=100)
        with relay_with(tmp_path, sink, hook) as relay:
            for _ in range(250):
                relay.send("bob@example.com")
            relay.wait_until_empty()
            assert wait_until(lambda: len(relay.events("webhook-gap")) >= 2, timeout=60)
            relay.kill()
            receiver.answers["/hook"] = Answer()
            receiver.posts.clear()
            relay.restart()
            assert wait_until(lambda: sum_of(receiver) == 250, timeout=60), receiver.types()
            metrics = relay.http("/metrics")[1]
            assert 'zonerelay_webhook_queued{webhook="hook"} 0' in metrics

    def sum_of(receiver: Receiver) -> int:
        told = {post.id: post.event for post in receiver.taken()}.values()
        lost = sum(int(event["data"]["lost"]) for event in told if event["type"] == "webhook.gap")
        return lost + len(receiver.about("delivery.delivered"))

    story()


def test_a_reload_takes_webhooks_up_and_events_move_with_the_queue_to_another_engine(
    tmp_path: Path, sink: Sink, receiver: Receiver, zonerelay: Shell
) -> None:
    receiver.answers["/hook"] = Answer(503)
    hook = webhook(tmp_path, receiver)
    relay = relay_with(tmp_path / "old", sink)
    alone = relay.config.read_text()
    with relay:
        relay.send("before@example.com")
        relay.wait_until_empty()
        relay.config.write_text(alone + toml_document({}, {"webhook": [hook]}))
        relay.signal(signal.SIGHUP)
        assert wait_until(lambda: bool(relay.events("reloaded")), timeout=60)
        relay.send("bob@example.com", "carol@example.com")
        relay.wait_until_empty()
        assert wait_until(lambda: bool(receiver.posts), timeout=60)
        relay.terminate()
    other = relay_with(tmp_path / "new", sink, hook, backend="disk")
    directory = str(tmp_path / "exported")
    assert zonerelay(relay, "spool", "export", directory).status == 0
    assert zonerelay(other, "spool", "import", directory).status == 0
    receiver.answers["/hook"] = Answer()
    with other:
        posts_of(receiver, 3)
        assert receiver.types() == {"message.accepted": 1, "delivery.delivered": 2}
    # Events of a webhook that is gone leave the spool, in words.
    relay.config.write_text(alone)
    with relay:
        assert relay.events("webhook-gap")[0]["lost"] == 3


def test_workers_sign_with_all_keys_and_post_to_no_private_address_unless_allowed(
    tmp_path: Path, sink: Sink, receiver: Receiver, zonerelay: Shell
) -> None:
    (tmp_path / "old.secret").write_text(OLD)
    (tmp_path / "seed.secret").write_text("whsk_" + base64.b64encode(SEED).decode())
    hook = webhook(
        tmp_path, receiver, old_secrets=[str(tmp_path / "old.secret"), str(tmp_path / "seed.secret")]
    )
    url = f"https://127.0.0.1:{receiver.port}/inner"
    inner: Table = {**webhook(tmp_path, receiver, "/inner"), "private": False, "url": url}
    with relay_with(tmp_path, sink, hook, inner, workers=2) as relay:
        for _ in range(4):
            relay.send("bob@example.com")
        for post in posts_of(receiver, 8):
            assert verified(post) == verified(post, OLD)
            signed = f"{post.id}.{post.headers['webhook-timestamp']}.".encode() + post.body
            (asymmetric,) = (each for each in post.headers["webhook-signature"].split() if each[:4] == "v1a,")
            public = Ed25519PrivateKey.from_private_bytes(SEED).public_key()
            public.verify(base64.b64decode(asymmetric[4:]), signed)

        tested = zonerelay(relay, "webhook", "test", "inner")
        assert tested.status == 1
        assert "private addresses (127.0.0.1); set private = true" in tested.out
        assert zonerelay(relay, "webhook", "test", "hook").status == 0
        assert zonerelay(relay, "webhook", "test", "other").status == 1
        rows = {row["name"]: row for row in zonerelay(relay, "webhook", "list", "--json").rows}
        assert (rows["hook"]["state"], rows["hook"]["queued"], rows["hook"]["delivered"]) == ("ok", 0, 8)
        assert (rows["inner"]["state"], rows["inner"]["queued"]) == ("failing", 8)
        assert zonerelay(relay, "webhook", "replay", "inner").out == "8\n"
        zonerelay.found(relay, "bob@example.com", "--outcome", "delivered", count=4)
        assert zonerelay(relay, "webhook", "replay", "inner", "--since", "1h").out == "16\n"
        assert zonerelay(relay, "queue", "list", "--json").rows == []
    assert not [post for post in receiver.posts if post.path == "/inner"]
