"""The operators' page in a real browser, over a real relay and a real sandbox."""

import re
import smtplib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Browser, Dialog, Locator, Page

from tests.support.browser import axe_script, browser, judged
from tests.support.credentials import token
from tests.support.ports import LOOPBACK, free_port, wait_until
from tests.support.process import RelayProcess
from tests.support.sandbox import ask, sandbox_process
from zonerelay.config.credentials.identities import identities_file, make_token, remove

QUEUED = 10_000
HOSTILE_SUBJECT = "<img src=x onerror=alert(1)><script>alert(2)</script> \x1b[31mred\x1b]0;title\x07"
HOSTILE_SENDER = '"<script>alert(3)</script>"@example.org'
BIDI = "\u202egpj.exe\u2066"
PATIENCE = 60_000
"""Milliseconds, which only a failure takes."""

PAGES = (
    "/",
    "/destinations",
    "/queue?q=nonsense",
    "/queue?q=to:@example.net",
    "/act?verb=reroute&q=to:@example.net",
    "/history?value=@example.net",
    "/suspensions",
    "/tail",
    "/configuration?changed=1",
    "/sessions",
    "/message/nonsense",
)
"""Of long tables few rows: axe-core looks at each, and they are alike."""

CUT = """[document.documentElement, ...document.querySelectorAll('.scroll')].filter(
    each => each.scrollWidth > each.clientWidth + 1).map(each => each.ariaLabel || each.tagName)"""
"""What is wider than its place."""


@dataclass
class Served:
    """A relay with the page, and a token."""

    base: str
    token: str
    smtp_port: int
    identities: Path

    def submit(self, sender: str, *recipients: str, subject: str = "A subject", n: int = 1) -> None:
        with smtplib.SMTP(LOOPBACK, self.smtp_port, timeout=60) as client:
            for number in range(n):
                field = f"Message-ID: <{number}.{time.time_ns()}@example.org>"
                text = f"From: {sender}\r\nSubject: {subject}\r\n{field}\r\n\r\n<script>alert(4)</script>\r\n"
                client.sendmail(sender, recipients, text.encode(), mail_options=["SMTPUTF8"])

    def request(
        self, method: str, path: str, body: dict[str, str] | None = None, **fields: str
    ) -> tuple[int, dict[str, str], str]:
        if body is not None:
            fields["Content_Type"] = "application/x-www-form-urlencoded"
        port = int(self.base.rpartition(":")[2])
        status, answered, octets = ask(port, method, path, urlencode(body or {}), **fields)
        return status, answered, octets.decode()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With mail for a next hop that is not there."""
    directory = tmp_path_factory.mktemp("page")
    process = RelayProcess(directory, next_hop=f"{LOOPBACK}:{free_port()}")
    config = process.config.read_text()
    process.config.write_text(config.replace("[admin]", "[admin]\npage = true"))
    with process:
        path = identities_file(directory)
        served = Served(f"http://{LOOPBACK}:{process.admin_port}", token(path), process.smtp_port, path)
        for each in range(QUEUED // 1000):
            served.submit(
                "news@example.org", *(f"reader{each}-{number}@example.com" for number in range(1000))
            )
        served.submit("bob@example.org", "alice@example.net")
        yield served


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with sandbox_process(tmp_path_factory.mktemp("sandbox")) as (smtp, http, text):
        served = Served(f"http://{LOOPBACK}:{http}", text, smtp, Path())
        served.submit("bob@example.org", "someone@example.com", subject="Delivered")
        served.submit(HOSTILE_SENDER, "defer-451@example.net", subject=HOSTILE_SUBJECT + BIDI)
        yield served


class Operator:
    """At the browser, with a mouse or by keys alone."""

    def __init__(self, page: Page, *, by_keys: bool) -> None:
        self.page = page
        self._by_keys = by_keys
        page.set_default_timeout(PATIENCE)

    def press(self, target: Locator) -> None:
        if not self._by_keys:
            target.click()
            return
        self._reach(target)
        self.page.keyboard.press("Enter")

    def write(self, target: Locator, text: str) -> None:
        if self._by_keys:
            self._reach(target)
            self.page.keyboard.press("ControlOrMeta+a")
            self.page.keyboard.type(text)
        else:
            target.fill(text)

    def _reach(self, target: Locator) -> None:
        """By the Tab key, whose focus can be seen."""
        target.wait_for()
        for _ in range(300):
            if target.evaluate("each => each === document.activeElement"):
                outline = target.evaluate("each => getComputedStyle(each).outlineStyle")
                assert outline != "none", target
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"the Tab key does not lead to {target}")

    def log_in(self, served: Served, to: str = "/") -> None:
        self.page.goto(served.base + to)
        self.write(self.page.get_by_label("Token"), served.token)
        self.press(self.page.get_by_role("button", name="Log in"))
        self.page.get_by_role("navigation", name="Pages").wait_for()

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    def text(self, text: str) -> None:
        self.page.get_by_text(text).first.wait_for()


@pytest.fixture(params=["mouse", "keys"])
def operator(request: pytest.FixtureRequest, chromium: Browser) -> Iterator[Operator]:
    context = chromium.new_context()
    page = context.new_page()
    trouble: list[str] = []

    def on_dialog(dialog: Dialog) -> None:
        trouble.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    page.on("dialog", on_dialog)
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on(
        "request",
        lambda each: None if each.url.startswith(f"http://{LOOPBACK}:") else trouble.append(each.url),
    )
    yield Operator(page, by_keys=request.param == "keys")
    assert not trouble
    context.close()


def test_filter_hold_ten_thousand_and_undo(operator: Operator, relay: Served) -> None:
    page = operator.page
    operator.log_in(relay, "/queue?q=zone:default")
    operator.write(page.get_by_label("Filter"), "bob")
    operator.press(operator.button("Filter"))
    operator.text("bob: specify a field, for example to:bob or from:bob")
    operator.write(page.get_by_label("Filter"), "to:@example.com")
    operator.press(operator.button("Filter"))
    page.wait_for_url("**/queue?q=to%3A%40example.com")
    operator.text("50 shown, there are more")
    operator.press(operator.button("Hold…"))
    operator.text("Hold 10,000 deliveries?")
    assert page.locator(".same code").inner_text() == "zonerelay queue hold --domain example.com --yes"
    operator.write(page.get_by_label("Reason"), "a test's")
    operator.press(operator.button("Hold 10,000 deliveries"))
    # Not always all of them: what is being tried at that moment is busy.
    operator.text("deliveries held")
    operator.press(operator.button("Undo"))
    operator.text("deliveries were restored")
    page.goto(f"{relay.base}/queue?q=state:held")
    operator.text("No delivery matches.")
    page.goto(f"{relay.base}/suspensions")
    assert page.get_by_text("a test's").count() >= 1


def test_suspend_and_resume_a_domain(operator: Operator, relay: Served) -> None:
    page = operator.page
    operator.log_in(relay, "/suspensions?what=domain&value=example.net")
    assert page.get_by_label("Name").input_value() == "example.net"
    operator.write(page.get_by_label("Reason"), "the customer asks for it")
    operator.press(operator.button("Apply"))
    operator.text("it applies to queued and to new mail")
    command = page.locator(".same code").first.inner_text()
    assert command == "zonerelay suspend --domain example.net --reason 'the customer asks for it'"
    operator.press(page.get_by_role("link", name="Back"))
    operator.text("the customer asks for it")
    operator.press(page.get_by_role("button", name="Resume order"))
    operator.text("The suspension has ended.")


def test_a_delivered_message_is_found_in_the_history(operator: Operator, sandbox: Served) -> None:
    page = operator.page
    operator.log_in(sandbox)
    operator.press(page.get_by_role("link", name="History", exact=True))

    def found() -> bool:
        operator.write(page.get_by_label("Address, domain"), "someone@example.com")
        operator.press(operator.button("Find"))
        page.locator("#found .count").wait_for()
        return page.locator("#found .state.delivered").count() >= 1

    assert wait_until(found, timeout=30, interval=0.5)
    operator.press(page.locator("#found a.id").first)
    page.get_by_role("heading", name="Timeline").wait_for()
    page.locator(".line .state.accepted").wait_for()  # there is one, or this is refused
    assert "250 2.0.0 accepted" in page.locator(".line").inner_text()


def test_hostile_text_is_shown_and_does_nothing(operator: Operator, sandbox: Served) -> None:
    page = operator.page
    operator.log_in(sandbox, "/queue?q=to:@example.net")
    operator.text(HOSTILE_SENDER)
    operator.press(page.locator("tbody th a").first)
    page.get_by_role("heading", name="Headers").wait_for()
    headers = page.locator(".headers").inner_text()
    assert "<img src=x onerror=alert(1)><script>alert(2)</script>" in headers
    assert "gpj.exe" in headers
    operator.press(operator.button("As received"))
    operator.text("<script>alert(4)</script>")
    for path in ("/", "/queue", "/history?value=@example.net", page.url.removeprefix(sandbox.base)):
        page.goto(sandbox.base + path)
        assert not set(page.content()) & set("\x1b\x07\u202e\u2066"), path
        assert page.locator("main script, main img").count() == 0


def test_the_sandbox_logs_in_by_its_link(chromium: Browser, sandbox: Served) -> None:
    context = chromium.new_context()
    page = context.new_page()
    page.goto(f"{sandbox.base}/#{sandbox.token}")
    page.wait_for_url(f"{sandbox.base}/")
    page.get_by_role("link", name="Live tail").click()
    page.get_by_text("Following.").wait_for()
    page.goto(f"{sandbox.base}/tail?address=tail@example.org")
    page.get_by_text("Following.").wait_for()
    sandbox.submit("tail@example.org", "someone@example.com")
    row = page.locator("#events tr")
    row.get_by_text("delivered", exact=True).wait_for()
    assert row.count() == 1, "of a message"
    assert row.locator(".state").all_inner_texts() == ["accepted", "delivered"]
    context.close()


def test_all_but_the_tail_works_without_scripts(chromium: Browser, relay: Served) -> None:
    context = chromium.new_context(java_script_enabled=False)
    operator = Operator(context.new_page(), by_keys=False)
    operator.log_in(relay, "/queue")
    operator.write(operator.page.get_by_label("Filter"), "to:@example.net")
    operator.press(operator.button("Filter"))
    operator.text("1 delivery.")
    operator.press(operator.button("Retry…"))
    operator.write(operator.page.get_by_label("Reason"), "without scripts")
    operator.press(operator.button("Retry 1 delivery"))
    operator.text("will be retried now.")
    operator.press(operator.button("Log out"))
    operator.page.get_by_label("Token").wait_for()
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(chromium: Browser, relay: Served, scheme: str) -> None:
    axe = axe_script()
    rules = ["color-contrast"] if scheme == "dark" else []
    context = chromium.new_context(color_scheme="dark" if scheme == "dark" else "light")
    page = context.new_page()
    page.goto(f"{relay.base}/login")
    found = {"/login": judged(page, axe, rules)}
    Operator(page, by_keys=False).log_in(relay)
    page.goto(f"{relay.base}/queue?q=to:@example.net")
    message = page.locator("tbody th a").first.get_attribute("href")
    assert message is not None
    for path in (*PAGES, message):
        page.goto(relay.base + path)
        found[path] = judged(page, axe, rules)
        for width in (360, 390, 800):
            page.set_viewport_size({"width": width, "height": 740})
            cut = page.evaluate(CUT)
            assert not cut, (path, width, cut)
        page.set_viewport_size({"width": 1280, "height": 800})
    context.close()
    assert not {path: each for path, each in found.items() if each}


# --- without a browser --------------------------------------------------------------------------------------


def log_in(served: Served, text: str) -> str:
    """Returns the field of the cookie."""
    status, fields, _ = served.request("POST", "/login", {"token": text, "to": "//evil.example"})
    assert (status, fields["Location"]) == (303, "/")
    cookie = fields["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    return cookie.partition(";")[0]


def test_only_who_may_sees_and_acts(relay: Served) -> None:
    status, fields, _ = relay.request("GET", "/queue?q=state:held")
    assert (status, fields["Location"]) == (303, "/login?to=%2Fqueue%3Fq%3Dstate%3Aheld")
    status, _, text = relay.request("POST", "/login", {"token": make_token()})
    assert status == 401
    assert "the token is invalid" in text
    reader = log_in(relay, token(relay.identities, "reader", "read"))
    status, fields, text = relay.request("GET", "/queue", Cookie=reader)
    assert status == 200
    assert "Hold…" not in text
    assert "script-src 'self'" in fields["Content-Security-Policy"]
    check = re.search(r'name="check" value="([^"]+)"', text)
    assert check is not None
    form = {"verb": "hold", "q": "", "reason": "x", "check": check[1]}
    assert relay.request("POST", "/act", form, Cookie=reader)[0] == 403
    assert relay.request("GET", "/act?verb=hold&q=", Cookie=reader)[0] == 403
    operator = log_in(relay, relay.token)
    for foreign in ({"Origin": "http://evil.example"}, {"Sec_Fetch_Site": "cross-site"}, {}):
        assert relay.request("POST", "/act", form, Cookie=operator, **foreign)[0] == 403
    remove(relay.identities, "reader")
    assert relay.request("GET", "/queue", Cookie=reader)[0] == 303


def test_the_overview_has_messages_per_minute(relay: Served) -> None:
    _, _, text = relay.request("GET", "/", Cookie=log_in(relay, relay.token))
    assert f"{QUEUED // 1000 + 1} accepted</span>" in text
    plot = re.search(r'class="node ready" d="(M[^"]+)"', text)
    assert plot is not None


def test_a_session_can_be_ended(relay: Served) -> None:
    one, other = log_in(relay, relay.token), log_in(relay, relay.token)
    _, _, text = relay.request("GET", "/sessions", Cookie=one)
    check = re.search(r'name="check" value="([^"]+)"', text)
    assert check is not None
    assert relay.request("POST", "/logout", {"check": check[1]}, Cookie=one)[0] == 303
    assert relay.request("GET", "/sessions", Cookie=one)[0] == 303
    _, _, text = relay.request("GET", "/sessions", Cookie=other)
    check = re.search(r'name="check" value="([^"]+)"', text)
    assert check is not None
    relay.request("POST", "/sessions", {"check": check[1], "end": "all"}, Cookie=other)
    assert relay.request("GET", "/", Cookie=other)[0] == 303


def test_files_are_kept_for_good(relay: Served) -> None:
    _, _, text = relay.request("GET", "/login")
    for path in re.findall(r'(?:src|href)="(/static/[^"]+)"', text):
        status, fields, _ = relay.request("GET", path)
        assert status == 200
        assert "immutable" in fields["Cache-Control"]
    assert relay.request("GET", "/static/page.css")[0] == 404


def test_a_tail_says_what_cannot_be_looked_for(relay: Served) -> None:
    operator = log_in(relay, relay.token)
    status, fields, text = relay.request("GET", "/tail/events?address=*bob*", Cookie=operator)
    assert (status, fields["Content-Type"]) == (200, "text/event-stream")
    assert "pseudonyms" in text
