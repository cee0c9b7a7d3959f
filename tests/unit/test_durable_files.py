"""Only zonerelay/durable.py makes, writes and renames files; every other place that does has its reason here.

A file that is written in another way is whole in memory, and empty or without a name after a power cut:
orders of operators, tokens and keys were lost like that.
"""

import ast
import os
import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import pytest

from tests.support.source import PACKAGE, modules, tree_of
from zonerelay import durable

METHODS = frozenset({"write_text", "write_bytes", "touch", "mkdir", "rename", "symlink_to", "hardlink_to"})
FUNCTIONS = {
    "os": {"replace", "rename", "renames", "link", "symlink", "mkdir", "makedirs", "truncate", "mkfifo"},
    "shutil": {"copy", "copy2", "copyfile", "copyfileobj", "copytree", "move"},
    "tempfile": {"mkstemp", "mkdtemp", "NamedTemporaryFile"},
    "sqlite3": {"connect"},
}
WRITING = {"O_CREAT", "O_WRONLY", "O_RDWR", "O_APPEND", "O_TRUNC"}
_ANY = re.compile(rf"\b({'|'.join((*METHODS, *chain(*FUNCTIONS.values()), *WRITING, 'open'))})\b")

_ENGINE = "a storage engine, which syncs in batches of its own; tests/store/test_crash.py cuts its power"
_REPAIR = "copies that the repair makes of an engine's files, synced before the exchange; tests/store kill it"
_SQLITE = "SQLite syncs its file and the name of it; the directory is made by durable"
_LOCK = "a lock has no content"
_SCRATCH = "scratch, which is worth nothing after this process"
_OUTPUT = "output for the operator, a line at a time"
ALLOWED = {
    "durable.py": "the one place",
    "sendmail.py": "imports nothing of the rest; it syncs the file and the directory itself",
    "capture/store.py": _SQLITE,
    "history/database.py": _SQLITE,
    "inbound/limits/usage_file.py": _SQLITE,
    "store/queue/key_index.py": _SQLITE,
    "transfer/migration.py": _SQLITE,
    "cli/spool/home_files.py": "a draft of a database, which durable.rename syncs",
    "transfer/files.py": "drafts of an export, which durable.sync_tree and durable.rename sync",
    "transfer/loader.py": "lines are appended and synced; durable has made the file",
    "transfer/others/zonemta.py": "scratch and the lock of another system's database",
    "inbound/drop_directory.py": "a refused file gets another name; it is refused again if that is lost",
    "supervisor/lock.py": _LOCK,
    "cli/operate/tail.py": _OUTPUT,
    "cli/main.py": "standard output becomes /dev/null",
    "store/check.py": "records are appended and synced, and the name with the first of them",
    "store/directories.py": "octets that mean nothing",
    "store/objects/disk.py": "values that no batch names yet, drafts, and a lock, which has no content",
    "sandbox/run.py": "a certificate in a directory that goes with the sandbox",
    "store/keys/partition.py": "notes in a file that durable has made; a lost one weakens a comparison",
    "store/leveldb/spool.py": _SCRATCH,
    "store/leveldb/damage/directory.py": _ENGINE,
    "store/leveldb/damage/losses.py": "a link to a log, followed by a sync of the directory",
    "store/leveldb/offline.py": _REPAIR,
    "store/memory.py": _LOCK,
}


def writes(tree: ast.AST) -> Iterator[str]:
    """Calls that make, change or rename a file, as `line: what`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (what := _what(node)):
            yield f"{node.lineno}: {what}"


def _what(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Name):
        return f"open({_mode(call)})" if function.id == "open" and _mode(call) else ""
    if not isinstance(function, ast.Attribute):
        return ""
    owner = function.value.id if isinstance(function.value, ast.Name) else ""
    name = function.attr
    if owner == "durable":
        return ""
    if name in FUNCTIONS.get(owner, ()):
        return f"{owner}.{name}"
    if owner == "os":
        flags = {
            each.attr for part in call.args for each in ast.walk(part) if isinstance(each, ast.Attribute)
        }
        return "os.open" if name == "open" and flags & WRITING else ""
    if name == "open" and _mode(call):
        return f"open({_mode(call)})"
    # `str.replace` has two arguments, and that of a dataclass names its fields.
    is_path_replace = name == "replace" and len(call.args) == 1 and not call.keywords
    return f".{name}" if name in METHODS or is_path_replace else ""


def _mode(call: ast.Call) -> str:
    """The mode of an `open` that writes."""
    given = [*call.args, *(each.value for each in call.keywords if each.arg == "mode")]
    texts = [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return next(
        (each for each in texts if re.fullmatch("[rwaxbt+]{1,4}", each) and set(each) & set("wax+")), ""
    )


def test_files_are_written_in_one_place() -> None:
    found = {
        str(path.relative_to(PACKAGE)): places
        for path in modules()
        if _ANY.search(source := path.read_text())  # quicker than a tree
        and (places := list(writes(tree_of(source))))
    }
    new = {name: places for name, places in found.items() if name not in ALLOWED}
    assert not new, "use zonerelay/durable.py, or give a reason in ALLOWED"
    assert ALLOWED.keys() == found.keys(), "a reason without a use"


@pytest.mark.parametrize(
    "line",
    [
        'path.write_text("x")',
        "path.write_bytes(x)",
        "draft.replace(path)",
        "draft.rename(path)",
        "os.replace(draft, path)",
        'open(path, "wb")',
        'path.open("x")',
        'path.open(mode="r+b")',
        "os.open(path, os.O_RDWR | os.O_CREAT, 0o600)",
        "path.mkdir(parents=True)",
        "path.touch()",
        "shutil.copy2(a, b)",
        "tempfile.mkstemp()",
        "sqlite3.connect(path)",
    ],
)
def test_every_way_is_seen(line: str) -> None:
    assert list(writes(ast.parse(line)))


@pytest.mark.parametrize("dress", [None, lambda _: None])
def test_only_a_regular_file_is_replaced(tmp_path: Path, dress: Callable[[int], None] | None) -> None:
    """Root could replace a device such as /dev/null, for all programs of the machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"):
        durable.write(pipe, b"x", dress=dress)
    assert list(tmp_path.iterdir()) == [pipe]
    assert pipe.is_fifo()
