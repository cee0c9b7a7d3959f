"""Events and decisions are checked when they are built; classes are found or refused in words."""

import dataclasses
import email.header
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from zonerelay.inbound.policy import api
from zonerelay.inbound.policy.api import EVENTS, MAX_FIELD_NAME, Decision, PolicyContext, accept
from zonerelay.inbound.policy.runner import load_authenticator, load_policy
from zonerelay.message.header import edit_header
from zonerelay.model.reply import Reply

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "send" / "policy.md").read_text(encoding="utf-8")


def test_helpers_make_decisions() -> None:
    assert accept() == api.ACCEPT == Decision()
    assert accept(zone="bulk", add=[("X-A", "1")], remove={"X-B"}) == Decision(
        zone="bulk", add=(("X-A", "1"),), remove=("X-B",)
    )
    assert api.refuse(450, "7.1", "later") == Decision(reply=Reply(450, "7.1", "later"))
    assert not api.ACCEPT.edits_header
    assert accept(remove=["X-B"]).edits_header


NOT_ONE_LINE = ["a\r\nBcc: x@y", "a\nb", "a\rb", "a\0b", "\x1b[2J", "é", "a\x7f"]


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        *(((code, "7.1", "no"), "code") for code in (200, 250, 354, 399, 600, 999)),
        *(((550, each, "no"), "detail") for each in ("", "5.7.1", "7", "7.1.", "a.b", "7.1\r\n", "7777.1")),
        *(
            ((550, "7.1", text), "the text must be")
            for text in ("", "a\tb", "x" * (api.MAX_REPLY_TEXT + 1), *NOT_ONE_LINE)
        ),
    ],
)
def test_a_refusal_has_code_detail_and_one_printable_line(reply: tuple[int, str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        api.refuse(*reply)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *(
            (name, "not a header field name")
            for name in ("", "X Y", "X:", "X-Ä", "X\r\nBcc", "X\0", "X\t", "x" * (MAX_FIELD_NAME + 1))
        ),
        *((name, "Received") for name in ("Received", "RECEIVED", "received")),
    ],
)
def test_a_field_has_a_name_of_its_own_and_not_the_relays(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        accept(add=[(name, "v")])
    with pytest.raises(ValueError, match=words):
        accept(remove=[name])


@pytest.mark.parametrize("value", [*NOT_ONE_LINE, "a\u2028b"])
def test_a_value_is_one_printable_line(value: str) -> None:
    with pytest.raises(ValueError, match="X-Note must be a single line of printable ASCII"):
        accept(add=[("X-Note", value)])


def test_lengths_are_bounded_so_that_folding_breaks_no_word() -> None:
    longest = "w" * 900
    field = edit_header(b"", add=[("X" * MAX_FIELD_NAME, longest)])
    assert accept(add=[("X" * MAX_FIELD_NAME, longest)])
    assert longest.encode() in field
    assert all(len(line) <= 998 for line in field.split(b"\r\n"))
    assert accept(add=[("X", "w " * (api.MAX_FIELD_VALUE // 2))])
    for value in ("w" * 901, "w " * (api.MAX_FIELD_VALUE // 2) + "w"):
        with pytest.raises(ValueError, match="characters"):
            accept(add=[("X", value)])
    many = [("X-Note", "v")] * (api.MAX_EDITS + 1)
    with pytest.raises(ValueError, match="at most"):
        accept(add=many)
    with pytest.raises(ValueError, match="at most"):
        accept(remove=[name for name, _ in many])


def test_a_refusal_changes_nothing() -> None:
    mores: list[dict[str, Any]] = [{"zone": "bulk"}, {"add": (("X", "1"),)}, {"remove": ("X",)}]
    for more in mores:
        with pytest.raises(ValueError, match="a rejection can neither choose a zone"):
            Decision(reply=Reply(550, "7.1", "no"), **more)


# Any: these are mistakes that a type checker would have found.
ACCEPTS: Any = accept
DECIDES: Any = Decision

WRONG_TYPES: list[tuple[Any, dict[str, Any]]] = [
    (ACCEPTS, {"remove": "X-Spam"}),
    (ACCEPTS, {"zone": None}),
    (ACCEPTS, {"zone": b"bulk"}),
    (ACCEPTS, {"add": [("X-A", 1)]}),
    (ACCEPTS, {"add": [(b"X-A", "1")]}),
    (ACCEPTS, {"remove": [b"X-A"]}),
    (DECIDES, {"add": [("X", "1")]}),
    (DECIDES, {"add": (["X", "1"],)}),
    (DECIDES, {"reply": "550 no"}),
    (DECIDES, {"reply": 550}),
]


@pytest.mark.parametrize(("make", "wrong"), WRONG_TYPES)
def test_wrong_types_are_told_apart_from_wrong_values(make: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        make(**wrong)


def test_the_base_class_accepts_every_step() -> None:
    policy = api.Policy(PolicyContext())
    for event in EVENTS:
        # Nothing of the event is looked at.
        assert getattr(policy, event.step)(api.Connect()) is None
    assert policy.close() is None


# ---- loading ------------------------------------------------------------------------------------

MODULE = """
import sys
from zonerelay.inbound.policy import Policy
from zonerelay.inbound.policy import Policy as Base

class Good(Policy):
    def mail(self, event): return None

class Inherited(Good):
    pass

class Asleep(Policy):
    def mails(self, event): return None

class Picky(Good):
    def __init__(self, context):
        raise ValueError("there is no file")

class Broken(Good):
    def __init__(self, context):
        raise KeyError("x")

class Leaving(Good):
    def __init__(self, context):
        sys.exit(3)

class Bare(Good):
    def __init__(self):
        pass

class Other:
    def mail(self, event): return None

number = 5
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    monkeypatch.syspath_prepend(tmp_path)
    made: list[str] = []

    def write(text: str) -> str:
        name = f"operators_{tmp_path.name.replace('-', '_')}_{len(made)}"
        (tmp_path / f"{name}.py").write_text(text)
        made.append(name)
        return name

    yield write
    for name in made:
        sys.modules.pop(name, None)


def test_a_class_is_found_and_given_its_context(module: Callable[[str], str]) -> None:
    name = module(MODULE)
    context = PolicyContext(listener="[::]:25", hostname="relay.example.org", file=Path("x"))
    policy = load_policy(f"{name}:Good", context)
    assert type(policy).__name__ == "Good"
    assert policy.context is context
    assert type(load_policy(f"{name}:Inherited", context)).__name__ == "Inherited"


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("Goode", "has no 'Goode'; did you mean Good"),
        ("Nothing", "has no 'Nothing'"),
        ("number", "nor an aiosmtpd handler: this object has no method such as handle_DATA"),
        ("Other", "is neither a subclass of zonerelay.inbound.policy.Policy nor"),
        ("Asleep", "methods are connect, helo, auth, mail, rcpt, headers, end_of_data"),
        ("Base", "has no method for an event"),
        ("Picky", "cannot be used: there is no file"),
        ("Broken", "cannot be used: KeyError: 'x'"),
        ("Leaving", "cannot be used: SystemExit: 3"),
        ("Bare", "cannot be used: TypeError: .*takes 1 positional argument"),
    ],
)
def test_an_unusable_class_is_refused_in_words(module: Callable[[str], str], wanted: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_policy(f"{module(MODULE)}:{wanted}", PolicyContext())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import no_such_library", "it requires 'no_such_library', which is not installed"),
        ("import sys; sys.exit(1)", "cannot import '.*': SystemExit: 1"),
        ("def broken(:", "cannot import '.*': SyntaxError"),
        ("1 // 0", "cannot import '.*': ZeroDivisionError"),
    ],
)
def test_a_module_that_is_not_imported_says_why(module: Callable[[str], str], text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_policy(f"{module(text)}:Mine", PolicyContext())


@pytest.mark.parametrize("name", ["no_such_policy", "no_such_policy.inner"])
def test_a_missing_module_says_where_to_put_it(name: str) -> None:
    with pytest.raises(ValueError, match=r"the directory of no_such_policy\.py to PYTHONPATH") as caught:
        load_policy(f"{name}:Mine", PolicyContext())
    assert sys.prefix in str(caught.value)


@pytest.mark.parametrize("name", ["mypolicy", "mypolicy:", ":Mine"])
def test_a_name_without_its_half_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match='expected "module:Class", not'):
        load_policy(name, PolicyContext())


# ---- docs/send/policy.md -----------------------------------------------------------------------------


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.proof  # a whole pytest
def test_the_pages_policy_and_its_test_work(tmp_path: Path) -> None:
    for block in blocks("python"):
        name = block.partition("\n")[0].removeprefix("# ")
        (tmp_path / name).write_text(block)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["mycheck.py", "myhandlers.py", "mypolicy.py", "test_mypolicy.py"]
    paths = os.pathsep.join((str(tmp_path), str(ROOT)))
    done = subprocess.run(
        # Its own directory: pytest would make the common one private under the feet of other tests' servers.
        [
            sys.executable,
            *("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'temporary'}"),
            str(tmp_path),
        ],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "2 passed" in done.stdout, done.stdout


def test_the_pages_handlers_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for block in blocks("python"):
        name = block.partition("\n")[0].removeprefix("# ")
        (tmp_path / name).write_text(block.replace("/var/lib/copies", str(tmp_path / "copies")))
    for name in ("myhandlers:Gateway", "myhandlers:copies"):
        assert load_policy(name, PolicyContext()).events != EVENTS
    load_authenticator("mycheck:check", PolicyContext())


def test_the_page_names_every_step_and_field() -> None:
    for event in EVENTS:
        row = next(
            line for line in PAGE.splitlines() if line.startswith(f"| `{event.step}` | `{event.__name__}`")
        )
        # The others are for handlers of aiosmtpd.
        fields = [each.name for each in dataclasses.fields(event) if each.compare and each.name != "client"]
        if event.step != "end_of_data":
            assert [name for name in fields if f"`{name}`" not in row] == []


def test_the_pages_way_to_encode_a_value_is_accepted() -> None:
    text = "Grüße aus Köln " * 15
    value = str(email.header.Header(text, "utf-8").encode(linesep=""))
    field = edit_header(b"", add=[("Subject", value)]).decode()
    decoded = email.header.decode_header(field.removeprefix("Subject:"))
    assert accept(add=[("Subject", value)])
    assert "".join(part.decode(charset or "ascii") for part, charset in decoded) == text
