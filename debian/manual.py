"""Writes manual pages, completion and reference pages, from commands, operations and options.

    PYTHONPATH=… python3 debian/manual.py ROOT
    PYTHONPATH=… python3 debian/manual.py --reference docs/reference

`zonerelay(1)` lists the commands, `zonerelay-COMMAND(1)` has one with all its verbs, `zonerelay.toml(5)` all
options. shtab makes the completion. Neither the wheel nor the relay needs any of this.
"""

from __future__ import annotations

import argparse
import gzip
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import sources

from zonerelay import __version__
from zonerelay.cli.arguments import DESCRIPTION, EXIT_STATUS, GROUPS, build
from zonerelay.config.toml_text import about as about_table
from zonerelay.config.toml_text import options
from zonerelay.operations.catalogue import OPERATIONS
from zonerelay.operations.operation import Operation, fields_of

COMPLETION = {
    "bash": "usr/share/bash-completion/completions/zonerelay",
    "zsh": "usr/share/zsh/vendor-completions/_zonerelay",
    "fish": "usr/share/fish/vendor_completions.d/zonerelay.fish",
}
END = (
    r"""
.SH FILES
.TP
.I /etc/zonerelay/zonerelay.toml
the configuration; see
.BR zonerelay.toml (5)
.TP
.I /usr/share/doc/zonerelay
the documentation; begin with docs/README.md
.SH ENVIRONMENT
.TP
.B ZONERELAY_CONFIG
the configuration file, where \-\-config names none
.SH EXIT STATUS
"""
    + EXIT_STATUS.partition(": ")[2]
    + "\n"
)
FORMAT = (
    "The file is TOML. A [table] is there once, a [[table]] as often as wanted. Durations are written 30s, "
    "5m, 2h and 5d, sizes 64 KB, 50 MB and 1 GB, both in quotes. Options are listed with their defaults. "
    "`zonerelay check-config` reports every mistake with its line; `zonerelay config show` prints what is "
    "active. Files conf.d/*.toml next to the file are read after it, in the order of their names: [[tables]] "
    "are joined, and a value that is given twice is an error."
)
COMMON = ("--config ", "--socket ")
COMMON_FROM = 3
"""Arguments of at least so many commands are described once."""
SEE = "\n.SH SEE ALSO\n.BR zonerelay (1)\n"


def escaped(text: str) -> str:
    """Text for roff: a hyphen that is typed stays one, and no line begins a request."""
    text = text.replace("\\", r"\e").replace("-", r"\-").replace("`", "'")
    return re.sub(r"(?m)^([.'])", r"\\&\1", text)


def head(name: str, summary: str, section: int = 1) -> str:
    return (
        f'.TH {name.upper()} {section} "" "zonerelay {__version__}" "zonerelay"\n.SH NAME\n'
        f"{escaped(name)} \\- {escaped(summary)}\n"
    )


def children(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """The name, the help and the parser of each command or verb."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, each in action.choices.items():
                yield name, (each.description or "").rstrip("."), each


def groups(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """What a command takes, by group: the words about the group, and each argument with its help."""
    formatter = parser._get_formatter()
    for group in parser._action_groups:
        taken = [
            (
                formatter._format_action_invocation(each),
                " ".join(formatter._expand_help(each).split()) if each.help else "",
            )
            for each in group._group_actions
            if not isinstance(each, argparse._SubParsersAction | argparse._HelpAction)
        ]
        if taken:
            yield group.description or "", taken


def usage(parser: argparse.ArgumentParser) -> str:
    return " ".join(parser.format_usage().removeprefix("usage: ").split()).removeprefix(parser.prog).strip()


def described(parser: argparse.ArgumentParser, heading: str) -> Iterator[str]:
    """What a command takes, for roff."""
    yield f"{heading}\n.nh\n.ad l\n.B {escaped(parser.prog)}\n{escaped(usage(parser))}\n.ad b\n.hy\n"
    if parser.description:
        yield f".PP\n{escaped(parser.description)}\n"
    for about, arguments in groups(parser):
        if about:
            yield f".PP\n{escaped(about)}\n"
        for invocation, words in arguments:
            yield f".TP\n.B {escaped(invocation)}\n{escaped(words)}\n"


def pages(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    parts = [head("zonerelay", DESCRIPTION[0].lower() + DESCRIPTION[1:-1]), ".SH SYNOPSIS\n"]
    parts.append(".B zonerelay\n.I COMMAND\n[options]\n.SH COMMANDS\n")
    titles = {commands[0].top: title for title, commands in GROUPS.items()}
    for name, summary, command in children(parser):
        if name in titles:
            parts.append(f".SS {titles[name]}\n")
        parts.append(f".TP\n.BR zonerelay\\-{escaped(name)} (1)\n{escaped(summary)}\n")
        verbs = list(children(command))
        page = [head(f"zonerelay-{name}", summary)]
        page += described(command, ".SH SYNOPSIS")
        page += [part for verb, _, each in verbs for part in described(each, f".SH {escaped(verb.upper())}")]
        yield f"zonerelay-{name}", "".join(page) + END + SEE
    yield "zonerelay", "".join(parts) + END


def configuration_manual() -> Iterator[str]:
    yield (
        head("zonerelay.toml", "configuration of zonerelay", 5) + ".SH DESCRIPTION\n" + escaped(FORMAT) + "\n"
    )
    for (heading, table), group in groupby(options(), lambda each: (each.heading, each.table)):
        yield f".SH {escaped(heading or 'TOP OF THE FILE')}\n{escaped(about_table(table))}\n"
        for each in group:
            yield f".TP\n\\fB{each.key}\\fR = {escaped(each.default)}\n{escaped(each.doc)}\n"
    yield SEE


def cell(text: str) -> str:
    """Text for a cell of a table in Markdown."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def commands_page(parser: argparse.ArgumentParser) -> Iterator[str]:
    commands = [
        each for _, _, command in children(parser) for each in [v for *_, v in children(command)] or [command]
    ]
    counts = Counter(row for each in commands for _, rows in groups(each) for row in rows)
    common = {row for row, count in counts.items() if count >= COMMON_FROM}
    yield (
        f"# Commands\n\nWritten by `debian/manual.py` from the commands. {EXIT_STATUS}\n\n"
        "A command takes `--config FILE` where it needs the configuration, and `--socket PATH` where it asks "
        "the relay. These arguments have the same meaning wherever a command takes them; "
        "`[FILTER]` stands for the conditions, `[OPTION]` for what is listed below a command.\n"
    )
    yield "\n"
    yield from listing([row for row in counts if row in common and not row[0].startswith(COMMON)])
    for each in commands:
        words = re.sub(r" \[(-h|--config FILE|--socket PATH)\]", "", f" {usage(each)}")
        rows = []
        for about, arguments in groups(each):
            rows += [row for row in arguments if row not in common and not row[0].startswith(COMMON)]
            for invocation, _ in arguments if about else ():
                words = words.replace(f" [{invocation}]", "", 1)
        listed = [f" [{name}]" for name, _ in rows if f" [{name}]" in words and name.startswith("--")]
        for option in listed:
            words = words.replace(option, "", 1)
        if listed:
            words = f" [OPTION]{words}"
        if any(about for about, _ in groups(each)):
            words = f" [FILTER]{words}"
        yield f"\n## {each.prog}\n\n{each.description}\n\n    {each.prog}{words}\n"
        yield from listing(rows)


def listing(rows: list[tuple[str, str]]) -> Iterator[str]:
    """Names with their texts as `--help` shows them, nothing for no rows."""
    width = min(max((len(name) for name, _ in rows), default=0), 28)
    for name, text in rows:
        first = f"{'':6}{name:{width}}  "
        yield textwrap.fill(text, 110, initial_indent=first, subsequent_indent=" " * (width + 8)) + "\n"


def operations_page() -> Iterator[str]:
    fields = {each.path + each.method: list(operation_fields(each)) for each in OPERATIONS if each.path}
    counts = Counter(row for rows in fields.values() for row in rows if not row[0].startswith("filter."))
    common = [row for row, count in counts.items() if count >= COMMON_FROM]
    yield (
        "# Paths of the HTTP API\n\nWritten by `debian/manual.py` from `zonerelay/operations`. "
        "[HTTP API](../operate/api.md) says how to ask; `/v1/openapi.json` has the types. In a `GET` the "
        "fields are parameters, in a `POST` members of the body. `filter` is an object with the fields that "
        "`GET /v1/queue` takes, `about` one with the fields below it. "
        "These fields have the same meaning in all requests that list them in a last line:\n"
    )
    yield "\n"
    yield from listing(common)
    for each in OPERATIONS:
        if not each.path:
            continue
        command = f", as `zonerelay {each.command}`" if each.command else ""
        yield f"\n## {each.method} {each.path}\n\n{each.help}{command}. Scope `{each.scope}`.\n"
        rows = fields[each.path + each.method]
        own = [row for row in rows if row not in common and not row[0].startswith("filter.")]
        if own:
            yield "\n"
        yield from listing(own)
        others = dict.fromkeys(name.partition(".")[0] for name, text in rows if (name, text) not in own)
        if also := [f"`{name}`" for name in others if f"{{{name}}}" not in each.path]:
            yield f"\nAlso {', '.join(also)}.\n"


def operation_fields(operation: Operation) -> Iterator[tuple[str, str]]:
    """The fields of a request, each with its help and choices."""
    for field in fields_of(operation.request):
        within = field.within and operation.method == "POST"
        choices = f": {', '.join(field.choices)}" if field.choices else ""
        yield f"{field.within}.{field.name}" if within else field.name, field.help + choices


def metrics_page(folder: Path) -> Iterator[str]:
    """The last column is written by hand, and kept."""
    notes = written_by_hand(folder / "metrics.md")
    yield (
        "# Metrics\n\nWritten by `debian/manual.py` from `zonerelay/telemetry`, except the last column: "
        "when to look into it. [Monitoring](../operate/monitoring.md) has alert rules and a dashboard.\n\n"
        "| metric | kind | value | look when |\n|---|---|---|---|\n"
    )
    for each in sources.metrics():
        labels = f"{{{','.join(each.fields)}}}" if each.fields else ""
        text = each.text.rstrip(".")
        yield f"| `{each.name}{labels}` | {each.kind} | {cell(text)} | {notes.get(each.name, '')} |\n"


def events_page(folder: Path) -> Iterator[str]:
    """The meanings are written by hand, and kept."""
    page = folder / "events.md"
    written = page.read_text() if page.exists() else ""
    meanings = dict(re.findall(r"(?m)^- `([\w-]+)` \([\w, ]+\): (.*?)\.?(?: Fields: .*)?$", written))
    yield (
        "# Log events\n\nWritten by `debian/manual.py` from the source, except the meanings. Every line has "
        "`time`, `level` and `event`; `id` is the message id. Fields without a value are left out.\n\n"
    )
    shown: dict[tuple[str, ...], str] = {}
    for each in sources.events():
        fields = tuple(each.fields)
        same = shown.setdefault(fields, each.name)
        listed = ", ".join(fields) if same == each.name or len(fields) < 4 else f"as `{same}`"
        listed = f" Fields: {listed}." if fields else ""
        yield f"- `{each.name}` ({each.kind}): {meanings.get(each.name, '')}.{listed}\n"


def written_by_hand(page: Path) -> dict[str, str]:
    """The last cell of each row of a page by its name."""
    rows = re.findall(r"(?m)^\| `([\w-]+).*\| (.*) \|$", page.read_text() if page.exists() else "")
    return dict(rows)


def configuration_page() -> Iterator[str]:
    yield f"# Configuration\n\nWritten by `debian/manual.py` from `zonerelay/config/tables`. {FORMAT}\n"
    for (heading, table), group in groupby(options(), lambda each: (each.heading, each.table)):
        yield f"\n## {heading or 'Top of the file'}\n"
        if table:
            yield f"\n{linked(about_table(table))}\n"
        yield "\n"
        for each in group:
            yield f"- `{each.key} = {each.default}`: {linked(cell(each.doc))}\n"


def linked(text: str) -> str:
    return re.sub(r"docs/([\w/-]+\.md)", r"[\1](../\1)", text)


def say_what_are_files(parser: argparse.ArgumentParser) -> None:
    """Tells shtab which words name files and directories."""
    import shtab  # noqa: PLC0415 - no page needs it

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            action.help = None  # shtab leaves out what help does not show
        if action.type is Path:
            is_directory = action.metavar == "DIR"
            action.complete = shtab.DIRECTORY if is_directory else shtab.FILE  # type: ignore[attr-defined]
    for _, _, each in children(parser):
        say_what_are_files(each)


def write_compressed(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def main(root: Path) -> None:
    import shtab  # noqa: PLC0415 - no page needs it

    parser = build()
    folder = root / "usr/share/man/man1"
    for name, text in pages(parser):
        write_compressed(folder / f"{name}.1.gz", text)
    write_compressed(root / "usr/share/man/man5/zonerelay.toml.5.gz", "".join(configuration_manual()))
    say_what_are_files(parser)
    for shell, place in COMPLETION.items():
        file = root / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(shtab.complete(parser, shell))


def reference(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "commands.md").write_text("".join(commands_page(build())))
    (folder / "configuration.md").write_text("".join(configuration_page()))
    (folder / "api.md").write_text("".join(operations_page()))
    for name, page in (("metrics.md", metrics_page), ("events.md", events_page)):
        (folder / name).write_text("".join(list(page(folder))))


if __name__ == "__main__":
    if sys.argv[1] == "--reference":
        reference(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]))
