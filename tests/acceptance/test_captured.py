"""Captured mail: Mailpit's own clients, hostile mail in a real browser, kill -9, releasing, tokens."""

import base64
import contextlib
import http.client
import http.server
import json
import os
import re
import smtplib
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Dialog

from tests.support.browser import axe_script, browser, judged
from tests.support.credentials import file_of, token, user
from tests.support.crew import run
from tests.support.mailpit import run_node, run_python
from tests.support.ports import LOOPBACK, free_port, wait_until
from tests.support.process import PROGRAM, RelayProcess
from tests.support.sandbox import ask, sandbox_process
from zonerelay.cli.main import main as command
from zonerelay.config.credentials.identities import identities_file
from zonerelay.config.settings import UnsafeListener

DOCS = Path(__file__).parents[2] / "docs" / "start" / "sandbox.md"
PIXEL = base64.b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d4944415478da63fccfc0f01f"
        "00050001ff5d6c0a5d0000000049454e44ae426082"
    )
).decode()


@dataclass
class Sandbox:
    smtp: int
    http: int
    token: str

    @property
    def base(self) -> str:
        return f"http://{LOOPBACK}:{self.http}"

    def submit(self, message: bytes, *to: str, sender: str = "app@example.org") -> None:
        with smtplib.SMTP(LOOPBACK, self.smtp, timeout=30) as client:
            client.sendmail(sender, to, message)

    def ask(
        self, method: str, path: str, body: object = None, **fields: str
    ) -> tuple[int, dict[str, str], bytes]:
        return ask(self.http, method, path, None if body is None else json.dumps(body), **fields)

    def wait_for(self, query: str) -> str:
        """The id of the only message."""

        def found() -> list[dict[str, str]]:
            return json.loads(self.ask("GET", f"/api/v1/search?query={query}")[2])["messages"]  # type: ignore[no-any-return]

        assert wait_until(lambda: len(found()) == 1, timeout=30)
        return found()[0]["ID"]


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with sandbox_process(tmp_path_factory.mktemp("captured")) as (smtp, http, text):
        yield Sandbox(smtp, http, text)


NODE = r"""
const mailpit = new MailpitClient(process.argv[1]);
const same = (a, b, what) => { if (a !== b) throw new Error(`${what}: ${a} is not ${b}`); };
await mailpit.deleteMessages();
const sent = await mailpit.sendMessage({
  From: { Email: "app@example.org", Name: "The app" }, To: [{ Email: "bob@example.com", Name: "Bob" }],
  Cc: [{ Email: "cc@example.com" }], Bcc: ["hidden@example.com"], ReplyTo: [{ Email: "re@example.com" }],
  Subject: "Grüße aus dem Test", Text: "Hello", HTML: '<p>Hello</p><img src="cid:dot">', Tags: ["one"],
  Headers: { "X-Test": "yes" },
  Attachments: [
    { Content: btoa("report"), Filename: "report.txt", ContentType: "text/plain" },
    { Content: process.argv[2], Filename: "dot.png", ContentType: "image/png", ContentID: "dot" },
  ],
});
const message = await mailpit.waitForMessage({ query: 'subject:"grüße aus" has:attachment is:unread' });
same(message.ID, sent.ID, "id");
same(message.Subject, "Grüße aus dem Test", "subject");
same(message.From.Name, "The app", "from");
same(message.Bcc[0].Address, "hidden@example.com", "bcc");
same(message.ReplyTo[0].Address, "re@example.com", "reply-to");
same(message.Text.trim(), "Hello", "text");
same(message.Inline[0].ContentID, "dot", "inline");
const file = await mailpit.getMessageAttachment(sent.ID, message.Attachments[0].PartID);
same(await file.text(), "report", "attachment");
same((await mailpit.getMessageHeaders(sent.ID))["X-Test"][0], "yes", "header");
if (!(await mailpit.getMessageSource("latest")).includes("X-Test: yes")) throw new Error("source");
if (!(await mailpit.renderMessageHTML()).includes("data:image/png")) throw new Error("html");
same((await mailpit.renderMessageText()).trim(), "Hello", "view");
same((await mailpit.listMessages()).unread, 0, "unread");
await mailpit.setReadStatus({ IDs: [sent.ID], Read: false });
same((await mailpit.searchMessages({ query: "is:unread to:bob -from:nobody" })).messages_count, 1, "search");
same((await mailpit.getTags())[0], "one", "tags");
same((await mailpit.getInfo()).Messages, 1, "info");
const chaos = await mailpit.setChaosTriggers({ Recipient: { ErrorCode: 451, Probability: 0 } });
same(chaos.Recipient.ErrorCode, 451, "chaos");
await mailpit.deleteMessagesBySearch({ query: "tag:one" });
const none = await mailpit.waitForMessages({ count: 0, exact: true });
same(none.total, 0, "deleted");
console.log("all well");
"""
PYTHON = r"""
import sys
from mailpit.client.api import API
api = API(sys.argv[1])
found = [each for each in api.get_messages(limit=10).messages if each.subject == "From Python"]
assert found and found[0].from_.address == "app@example.org", found
message = api.get_message(found[0].id)
assert message.to[0].name == "Bob" and message.text.strip() == "Hello" and message.date.year >= 2026
assert api.get_message_attachment(message.id, message.attachments[0].part_id) == "report"
assert api.get_message_headers(message.id).message_id == ["<python@example.org>"]
api.put_messages([message.id], "Read", False)
listed = lambda: {each.id: each for each in api.get_messages().messages}  # others arrive meanwhile
assert not listed()[message.id].read
api.delete_messages([message.id])
assert message.id not in listed()
print("all well")
"""


def test_clients_of_mailpit_find_what_they_expect(sandbox: Sandbox) -> None:
    assert "all well" in run_node(NODE, sandbox.base, PIXEL)
    message = EmailMessage()
    message["From"], message["To"], message["Subject"] = (
        "app@example.org",
        "Bob <b@example.com>",
        "From Python",
    )
    message["Message-ID"], message["Delivered-To"] = "<python@example.org>", "b@example.com"
    message["Date"] = "Wed, 25 Nov 2026 12:00:00 +0100"
    message.set_content("Hello\n")
    message.add_attachment(b"report", maintype="application", subtype="x-test", filename="report.bin")
    sandbox.submit(bytes(message), "b@example.com")
    sandbox.wait_for("message-id:python@")
    assert "all well" in run_python(PYTHON, sandbox.base)


def test_the_recipe_of_the_docs_runs(sandbox: Sandbox, tmp_path: Path) -> None:
    recipe = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert recipe is not None
    text = (
        recipe[1].replace("127.0.0.1:8025", f"{LOOPBACK}:{sandbox.http}").replace("2525", str(sandbox.smtp))
    )
    (tmp_path / "test_recipe.py").write_text(text)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null"]
    done = subprocess.run(
        [*words, "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_troubles_by_api(sandbox: Sandbox) -> None:
    status, _, _ = sandbox.ask("PUT", "/api/v1/chaos", {"Sender": {"ErrorCode": 451, "Probability": 100}})
    assert status == 200
    with pytest.raises(smtplib.SMTPSenderRefused, match="451"):
        sandbox.submit(b"Subject: x\r\n\r\nx\r\n", "chaos@example.com")
    assert sandbox.ask("PUT", "/api/v1/chaos", {})[0] == 200
    assert sandbox.ask("PUT", "/api/v1/chaos", {"Sender": {"ErrorCode": 200}})[0] == 400
    assert sandbox.ask("PUT", "/api/v1/behaviours", {"carol@example.com": "nonsense"})[0] == 400
    assert sandbox.ask("PUT", "/api/v1/behaviours", {"Carol@example.com": "reject-550"})[0] == 200
    sandbox.submit(b"Subject: to carol\r\n\r\nx\r\n", "carol@example.com", sender="dave@example.org")
    bounce = sandbox.wait_for("to:dave@example.org")
    assert b"550" in sandbox.ask("GET", f"/api/v1/message/{bounce}/raw")[2]
    assert sandbox.ask("PUT", "/api/v1/behaviours", {})[0] == 200


def test_any_log_in_is_accepted_also_over_tls_unless_chaos_refuses_it(sandbox: Sandbox) -> None:
    with smtplib.SMTP(LOOPBACK, sandbox.smtp, timeout=30) as client:
        client.starttls(context=ssl._create_unverified_context())
        assert client.login("anyone", "anything")[0] == 235
        client.sendmail("app@example.org", ["tls@example.com"], b"To: tls@example.com\r\n\r\nx\r\n")
    sandbox.wait_for("to:tls@example.com")
    with smtplib.SMTP(LOOPBACK, sandbox.smtp, timeout=30) as client:
        assert client.login("anyone", "anything")[0] == 235
    assert sandbox.ask("PUT", "/api/v1/chaos", {"Authentication": {"Probability": 100}})[0] == 200
    with smtplib.SMTP(LOOPBACK, sandbox.smtp, timeout=30) as client, pytest.raises(smtplib.SMTPException):
        client.login("anyone", "anything")
    assert sandbox.ask("PUT", "/api/v1/chaos", {})[0] == 200


def test_the_latest_message_is_the_latest_that_a_query_finds(sandbox: Sandbox) -> None:
    """Parallel tests share a sandbox: without the query each saw another one's mail."""
    for who in ("first", "second"):
        mail = f"To: {who}.query@example.com\r\nContent-Type: text/html\r\n\r\n<p>for {who}</p>\r\n"
        sandbox.submit(mail.encode(), f"{who}.query@example.com")
        sandbox.wait_for(f"to:{who}.query@example.com")
    assert b"for first" in sandbox.ask("GET", "/view/latest.html?query=to:first.query@example.com")[2]
    assert b"for second" in sandbox.ask("GET", "/view/latest.html?query=to:second.query@example.com")[2]
    assert sandbox.ask("GET", "/view/latest.html?query=to:third.query@example.com")[0] == 404
    assert sandbox.ask("GET", "/livez")[0] == 200


def test_tags_are_given_renamed_and_removed(sandbox: Sandbox) -> None:
    sandbox.submit(b"To: tags@example.com\r\n\r\nx\r\n", "tags@example.com")
    one = sandbox.wait_for("to:tags@example.com")
    assert sandbox.ask("PUT", "/api/v1/tags", {"IDs": [one], "Tags": ["red", "blue", "red"]})[0] == 200
    assert sandbox.ask("PUT", "/api/v1/tags/red", {"Name": "green"})[0] == 200
    assert sandbox.ask("DELETE", "/api/v1/tags/blue")[0] == 200
    assert sandbox.wait_for("tag:green+to:tags@example.com") == one
    assert json.loads(sandbox.ask("GET", f"/api/v1/message/{one}")[2])["Tags"] == ["green"]
    assert json.loads(sandbox.ask("GET", "/api/v1/info")[2])["Tags"]["green"] == 1
    assert sandbox.ask("PUT", "/api/v1/tags", {"IDs": [one], "Tags": ["a,b"]})[0] == 400


def test_a_sandbox_for_a_team(tmp_path: Path) -> None:
    """Other machines reach it by its name, send, and read without a token; new mail appears by itself."""
    smtp, page = free_port(), free_port()
    words = ["--listen", f"0.0.0.0:{smtp}", "--page", f"0.0.0.0:{page}"]
    refused = subprocess.run([str(PROGRAM), "sandbox", *words], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "is not a loopback address" in refused.stderr
    with (tmp_path / "output").open("wb") as file:
        process = subprocess.Popen([str(PROGRAM), "sandbox", "--open", *words], stdout=file, stderr=file)
    try:
        team = Sandbox(smtp, page, "")

        def is_ready() -> bool:
            with contextlib.suppress(OSError):
                return team.ask("GET", "/readyz", Host="mail:8025")[0] == 200
            return False

        assert wait_until(is_ready, timeout=60)
        with browser() as chromium:
            tab = chromium.new_page()
            tab.goto(f"{team.base}/captured")
            assert tab.title().startswith("Captured mail")
            team.submit(b"Subject: It came by itself\r\n\r\nx\r\n", "team@example.com")
            tab.get_by_text("It came by itself").wait_for(timeout=20_000)
        status, fields, _ = team.ask("GET", "/login?to=/captured", Host="mail:8025")
        assert (status, fields["Location"]) == (303, "/captured")
        assert team.ask("GET", "/captured", Host="mail.attacker.example:8025")[0] == 421
    finally:
        process.terminate()
        process.wait(30)


def test_the_sandbox_answers_no_page_of_another_origin(sandbox: Sandbox) -> None:
    assert sandbox.ask("GET", "/api/v1/messages", Host="evil.example")[0] == 421
    assert sandbox.ask("GET", "/api/v1/messages", Sec_Fetch_Site="cross-site")[0] == 403
    assert sandbox.ask("DELETE", "/api/v1/messages", Origin="http://evil.example")[0] == 403
    _, fields, _ = sandbox.ask("GET", "/api/v1/messages", Origin="http://evil.example")
    assert not any(name.lower().startswith("access-control") for name in fields)
    assert sandbox.ask("OPTIONS", "/api/v1/messages", Origin="http://evil.example")[0] == 405
    assert sandbox.ask("GET", "/api/v1/search?query=after:nonsense")[0] == 400
    assert sandbox.ask("GET", "/api/v1/message/nonsense")[0] == 404
    assert sandbox.ask("POST", "/api/v1/send", {"From": {"Email": "a\r\nBcc: x@y.example"}})[0] == 400


# --- hostile mail -------------------------------------------------------------------------------------------


@pytest.fixture
def tracker() -> Iterator[tuple[str, list[str]]]:
    """A server that hostile mail wants to be fetched from, and what was."""
    asked: list[str] = []

    class Notes(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    with http.server.ThreadingHTTPServer((LOOPBACK, 0), Notes) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{LOOPBACK}:{server.server_address[1]}", asked
        server.shutdown()


def hostile(to: str) -> bytes:
    html = f"""<html><head><base href="{to}/"><link rel="stylesheet" href="{to}/css">
<link rel=preload as=image href="{to}/preload"><meta http-equiv="refresh" content="0; url={to}/refresh">
<style>@import url({to}/import); body {{ background: url({to}/background) }}</style></head>
<body onload="fetch('{to}/onload')"><p id="there">It is shown</p><img id="own" src="cid:dot">
<img src="{to}/img" onerror="parent.document.title='pwned'"><iframe src="{to}/frame"></iframe>
<script>fetch("{to}/script"); document.getElementById("there").textContent = "pwned";</script>
<form action="{to}/form"><button id="send">Send</button></form><a id="away" href="{to}/away">Away</a>
<a id="top" target="_top" href="{to}/top">Top</a><video src="{to}/video" autoplay></video>
<object data="{to}/object"></object><svg><image href="{to}/svg"/></svg></body></html>"""
    message = EmailMessage()
    message["From"], message["To"] = '"<script>alert(1)</script>" <app@example.org>', "victim@example.com"
    message["Subject"] = "Hostile <img src=x onerror=alert(2)>"
    message.set_content("javascript:alert(3) http://links.example/?<script>alert(4)</script>\n")
    message.add_alternative(html, subtype="html")
    parts = message.get_payload()
    assert isinstance(parts, list)
    body = parts[1]
    assert isinstance(body, EmailMessage)
    body.add_related(base64.b64decode(PIXEL), "image", "png", cid="<dot>")
    name = '../../etc/pass"wd\u202egnp.html'
    message.add_attachment(b"<script>alert(5)</script>", maintype="text", subtype="html", filename=name)
    return bytes(message)


def test_hostile_mail_does_nothing(sandbox: Sandbox, tracker: tuple[str, list[str]]) -> None:
    base, asked = tracker
    sandbox.submit(hostile(base), "victim@example.com")
    path = f"/captured/{sandbox.wait_for('to:victim@example.com')}"
    with browser() as chromium:
        page = chromium.new_page()
        page.set_default_timeout(20_000)
        trouble: list[str] = []

        def on_dialog(dialog: Dialog) -> None:
            trouble.append(dialog.message)
            dialog.dismiss()

        page.on("dialog", on_dialog)
        page.goto(f"{sandbox.base}/#{sandbox.token}")
        page.get_by_role("link", name="Captured mail").click()
        page.get_by_label("Search").fill("subject:hostile")
        page.get_by_role("button", name="Search").click()
        page.get_by_role("link", name="Hostile").click()
        frame = page.frame_locator("iframe.frame")
        frame.get_by_text("It is shown").wait_for()
        assert frame.locator("#own").evaluate("each => each.naturalWidth") == 1
        for link in ("#send", "#away", "#top"):
            page.goto(sandbox.base + path)
            frame.locator(link).click(no_wait_after=True)
        page.wait_for_timeout(300)
        assert page.url == sandbox.base + path
        axe = axe_script()
        found = {}
        for view in ("html", "text", "source", "headers", "attachments", "links"):
            page.goto(f"{sandbox.base}{path}?view={view}")
            if view != "html":  # the HTML is the sender's
                found[view] = judged(page, axe)
            page.set_viewport_size({"width": 360, "height": 740})
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, view
            page.set_viewport_size({"width": 1280, "height": 800})
            assert page.locator("main script").count() == 0
        page.goto(f"{sandbox.base}/captured")
        found["list"] = judged(page, axe)
        assert not {view: each for view, each in found.items() if each}
        page.goto(f"{sandbox.base}{path}")
        page.get_by_role("button", name="Delete").click()
        page.wait_for_url("**/captured")
        assert page.get_by_role("link", name="Hostile").count() == 0
    assert not asked
    assert not trouble


def test_files_of_hostile_mail_are_saved_and_never_shown(sandbox: Sandbox) -> None:
    sandbox.submit(hostile("http://192.0.2.1"), "files@example.com")
    message_id = sandbox.wait_for("bcc:files@example.com")
    message = json.loads(sandbox.ask("GET", f"/api/v1/message/{message_id}")[2])
    number = message["Attachments"][0]["PartID"]
    for path in (f"/api/v1/message/{message_id}/part/{number}",):
        status, fields, body = sandbox.ask("GET", path)
        assert (status, body) == (200, b"<script>alert(5)</script>")
        assert fields["Content-Type"] == "application/octet-stream"
        assert fields["X-Content-Type-Options"] == "nosniff"
        assert fields["Content-Disposition"] == 'attachment; filename="__.._etc_pass_wd_gnp.html"'
    _, fields, _ = sandbox.ask("GET", f"/view/{message_id}.html")
    assert fields["Content-Security-Policy"].startswith("sandbox; default-src 'none'")


# --- a relay that captures ----------------------------------------------------------------------------------


def messages(relay: RelayProcess, text: str) -> list[dict[str, str]]:
    status, _, body = ask(
        relay.admin_port, "GET", "/api/v1/messages?limit=1000", Authorization=f"Bearer {text}"
    )
    assert status == 200, body
    found: list[dict[str, str]] = json.loads(body)["messages"]
    return found


def test_acknowledged_mail_is_captured_over_kill_9(tmp_path: Path) -> None:
    relay = RelayProcess(tmp_path, next_hop="capture:")
    acknowledged: list[str] = []
    with relay:
        text = token(identities_file(tmp_path))
        for run in range(2):
            stop = threading.Timer(0.4, relay.kill)
            stop.start()
            try:
                with smtplib.SMTP(LOOPBACK, relay.smtp_port, timeout=20) as client:
                    for number in range(10_000):
                        name = f"r{run}n{number}@example.com"
                        client.sendmail("app@example.org", [name], b"Subject: x\r\n\r\nx\r\n")
                        acknowledged.append(name)
            except (OSError, smtplib.SMTPException):
                pass
            stop.join()
            relay.start()
        assert acknowledged

        def kept() -> list[str]:
            found = []
            for start in range(0, 10_000, 1000):
                path = f"/api/v1/messages?limit=1000&start={start}"
                _, _, body = ask(relay.admin_port, "GET", path, Authorization=f"Bearer {text}")
                some = json.loads(body)["messages"]
                found += [each["Bcc"][0]["Address"] for each in some]
                if len(some) < 1000:
                    break
            return found

        assert wait_until(lambda: set(acknowledged) <= set(kept()), timeout=60, interval=0.5)
        found = kept()
        assert len(found) == len(set(found))  # a batch that is repeated makes no second message
        relay.terminate()
    copy = tmp_path / "backup"
    assert command(["spool", "check", "--config", str(relay.config)]) == 0
    assert command(["spool", "backup", str(copy), "--config", str(relay.config)]) == 0
    assert (copy / "home" / "captured" / "captured.db").stat().st_size > 4096


def test_only_an_operator_reads_and_releases(tmp_path: Path) -> None:
    port = free_port()
    relay = RelayProcess(
        tmp_path,
        next_hop="capture:",
        top={"workers": 2},
        tables={"capture": {"release_to": f"{LOOPBACK}:{port}"}},
    )
    target = RelayProcess(
        tmp_path / "target", next_hop="capture:", listener={"address": f"{LOOPBACK}:{port}"}
    )
    target.smtp_port = port
    with relay, target:
        operator, reader = (
            token(identities_file(tmp_path)),
            token(identities_file(tmp_path), "reader", "read"),
        )
        relay.send("bob@example.com")
        assert wait_until(lambda: len(messages(relay, operator)) == 1, timeout=30)
        assert ask(relay.admin_port, "GET", "/api/v1/messages")[0] == 401
        assert ask(relay.admin_port, "GET", "/api/v1/messages", Authorization=f"Bearer {reader}")[0] == 403
        assert ask(relay.admin_port, "GET", "/api/v1/chaos", Authorization=f"Bearer {operator}")[0] == 404
        basic = base64.b64encode(f"any:{operator}".encode()).decode()
        message_id = messages(relay, operator)[0]["ID"]
        status, _, body = ask(
            relay.admin_port, "GET", f"/api/v1/message/{message_id}/raw", Authorization=f"Basic {basic}"
        )
        assert (status, b"hello" in body) == (200, True)
        assert wait_until(lambda: f"captured message {message_id} read" in relay.log_text(), timeout=20)
        release = f"/api/v1/message/{message_id}/release"
        people = ["Carol [x] <carol@example.com>, Dan <dan@example.com>"]
        status, _, body = ask(
            relay.admin_port, "POST", release, json.dumps({"To": ["ann"]}), Authorization=f"Basic {basic}"
        )
        assert (status, body.startswith(b"To ")) == (400, True)
        status, _, body = ask(
            relay.admin_port, "POST", release, json.dumps({"To": people}), Authorization=f"Basic {basic}"
        )
        assert (status, body) == (200, b"ok")
        other = token(identities_file(tmp_path / "target"))
        assert wait_until(lambda: len(messages(target, other)) == 1, timeout=30)
        taken: Any = messages(target, other)[0]["Bcc"]
        assert sorted(each["Address"] for each in taken) == ["carol@example.com", "dan@example.com"]
        assert len(messages(relay, operator)) == 1
        assert relay.metric("zonerelay_captured_messages") == 1  # both workers count the same mail
        assert relay.metric("zonerelay_captured_bytes") > 100
        shown = run(relay, "status").stdout
        assert re.search(r"^captured +1 message, 4", shown, re.MULTILINE), shown


def test_mail_of_a_user_whose_mode_is_capture(tmp_path: Path) -> None:
    credentials = tmp_path / "credentials"
    credentials.write_text(file_of(user("staging"), user("shop")))
    relay = RelayProcess(
        tmp_path,
        next_hop=f"{LOOPBACK}:{free_port()}",
        listener={"auth": "optional", "unsafe": [UnsafeListener.CLEARTEXT_AUTH.value]},
        tables={
            "auth": {"credentials": str(credentials)},
            "zone": [
                {"name": "default", "next_hop": f"{LOOPBACK}:{free_port()}"},
                {"name": "captured", "next_hop": "capture:"},
            ],
        },
    )
    where = ["--config", str(relay.config)]
    assert command(["user", "set", "staging", "mode=capture", *where]) == 0
    with relay:
        text = token(identities_file(tmp_path))
        for name in ("shop", "staging"):
            relay.send(f"for-{name}@example.com", log_in=(name, "correct horse"))
        assert wait_until(lambda: len(messages(relay, text)) == 1, timeout=30)
        assert messages(relay, text)[0]["Bcc"][0]["Address"] == "for-staging@example.com"  # type: ignore[index]
        for setting, user_name, said in (
            ("", "staging", 'not sent, but captured (held if no zone captures mail; mode = "capture")'),
            ("recipients=example.com", "shop", "rejected with 550 5.7.1 This user may not send"),
            ("recipients=", "shop", ""),
        ):
            if setting:
                assert command(["user", "set", "shop", setting, *where]) == 0
            told = explained(relay, user_name)
            assert said in told
            assert ("guard rails" in told) == bool(said)
    assert command(["user", "set", "shop", "mode=redirect", "mailbox=qa@example.com", *where]) == 0
    assert "becomes qa@example.com (mode of the user shop)" in explained(relay, "shop")  # no relay runs


def explained(relay: RelayProcess, name: str) -> str:
    return run(relay, "explain", "someone@example.net", "--user", name).stdout


def test_without_a_zone_that_captures_there_is_nothing(tmp_path: Path) -> None:
    with RelayProcess(tmp_path, next_hop=f"{LOOPBACK}:{free_port()}") as relay:
        text = token(identities_file(tmp_path))
        assert ask(relay.admin_port, "GET", "/api/v1/messages", Authorization=f"Bearer {text}")[0] == 404
    assert not (tmp_path / "captured").exists()
