"""Writes manual pages and the completion of shells below a directory, from the parser of the commands.

    PYTHONPATH=… python3 debian/manual.py ROOT

`zonerelay(1)` lists the commands, `zonerelay-COMMAND(1)` has one with all its verbs. shtab makes the
completion. Neither the wheel nor the relay needs any of this.
"""

from __future__ import annotations

import argparse
import gzip
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import shtab

from zonerelay import __version__
from zonerelay.cli.arguments import build

COMPLETION = {
    "bash": "usr/share/bash-completion/completions/zonerelay",
    "zsh": "usr/share/zsh/vendor-completions/_zonerelay",
    "fish": "usr/share/fish/vendor_completions.d/zonerelay.fish",
}
END = r"""
.SH FILES
.TP
.I /etc/zonerelay/zonerelay.toml
the configuration; every option is in it with its default and its reason
.TP
.I /usr/share/doc/zonerelay
the documentation; begin with README.md and operating.md
.SH ENVIRONMENT
.TP
.B ZONERELAY_CONFIG
the configuration file, where \-\-config names none
.SH EXIT STATUS
0 done, 1 not possible or not found, 2 usage or configuration.
"""
SEE = "\n.SH SEE ALSO\n.BR zonerelay (1)\n"


def escaped(text: str) -> str:
    """Text for roff: a hyphen that is typed stays one, and no line begins a request."""
    text = text.replace("\\", r"\e").replace("-", r"\-").replace("`", "'")
    return re.sub(r"(?m)^([.'])", r"\\&\1", text)


def head(name: str, summary: str) -> str:
    return (
        f'.TH {name.upper()} 1 "" "zonerelay {__version__}" "zonerelay"\n.SH NAME\n'
        f"{escaped(name)} \\- {escaped(summary)}\n"
    )


def children(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """The name, the help and the parser of each command or verb."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action._choices_actions:
                yield each.dest, each.help or "", action.choices[each.dest]


def described(parser: argparse.ArgumentParser, heading: str) -> Iterator[str]:
    """What a command takes: its usage, its words and its options by group."""
    formatter = parser._get_formatter()
    yield f"{heading}\n"
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    words = escaped(usage.removeprefix(parser.prog).strip())
    yield f".nh\n.ad l\n.B {escaped(parser.prog)}\n{words}\n.ad b\n.hy\n"
    if parser.description:
        yield f".PP\n{escaped(parser.description)}\n"
    for group in parser._action_groups:
        actions = [
            each
            for each in group._group_actions
            if not isinstance(each, argparse._SubParsersAction | argparse._HelpAction)
        ]
        if actions and group.description:
            yield f".PP\n{escaped(group.description)}\n"
        for action in actions:
            invocation = formatter._format_action_invocation(action)
            words = formatter._expand_help(action) if action.help else ""
            yield f".TP\n.B {escaped(invocation)}\n{escaped(' '.join(words.split()))}\n"


def pages(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    parts = [head("zonerelay", "an SMTP relay that never loses what it acknowledged"), ".SH SYNOPSIS\n"]
    parts.append(".B zonerelay\n.I COMMAND\n[options]\n.SH COMMANDS\n")
    for name, summary, command in children(parser):
        parts.append(f".TP\n.BR zonerelay\\-{escaped(name)} (1)\n{escaped(summary)}\n")
        verbs = list(children(command))
        page = [head(f"zonerelay-{name}", summary)]
        page += described(command, ".SH SYNOPSIS")
        page += [part for verb, _, each in verbs for part in described(each, f".SH {escaped(verb.upper())}")]
        yield f"zonerelay-{name}", "".join(page) + END + SEE
    yield "zonerelay", "".join(parts) + END


def say_what_are_files(parser: argparse.ArgumentParser) -> None:
    """Tells shtab which words name files and directories."""
    for action in parser._actions:
        if action.type is Path:
            is_directory = action.metavar == "DIR"
            action.complete = shtab.DIRECTORY if is_directory else shtab.FILE  # type: ignore[attr-defined]
    for _, _, each in children(parser):
        say_what_are_files(each)


def main(root: Path) -> None:
    parser = build()
    folder = root / "usr/share/man/man1"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages(parser):
        (folder / f"{name}.1.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    say_what_are_files(parser)
    for shell, place in COMPLETION.items():
        file = root / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(shtab.complete(parser, shell))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
