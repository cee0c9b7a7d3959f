"""Defines the command line: `GROUPS` lists every command with its function and its arguments.

Commands that send a request to a relay take their help and their options from `operations/catalogue`. An
operation that the table does not name is a command as well. Only the parser of the given command is built, so
that every command responds immediately.

`parse` returns a namespace whose `run` names the function of the command. Values are converted to the types
that commands need, so a mistake is reported before a command does anything.
"""

from __future__ import annotations

import argparse
import ipaddress
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_origin

import msgspec
from msgspec import structs

from zonerelay import __version__
from zonerelay.cli.terminal.exits import USAGE, CliError
from zonerelay.config.units import format_duration, format_size, parse_duration, parse_size
from zonerelay.model.envelope import Priority, is_message_id

if TYPE_CHECKING:
    from zonerelay.operations.operation import FieldDescription, Operation

Parse = Callable[[str], Any]
R = TypeVar("R", bound=msgspec.Struct)
T = TypeVar("T")

DESCRIPTION = "An SMTP relay that never loses an acknowledged message."
EXIT_STATUS = "Exit status: 0 success, 1 failed or not found, 2 usage or configuration error."
SYSTEMS = ("postfix", "exim", "zonemta", "slimta-redis", "slimta-disk", "slimta-lua")
"""Whose queues `spool import --from` reads."""
PRIORITIES = tuple(each.value for each in Priority)
DAYS = 825  # the maximum on Apple's systems
MAX_DAYS = 36_500
LONGEST = MAX_DAYS * 86_400.0
"""Seconds of a period."""

_CONFIG_HELP = (
    "Configuration file (default: $ZONERELAY_CONFIG, /etc/zonerelay/zonerelay.toml, ./config/zonerelay.toml)"
)
_JSON_HELP = "Print JSON for scripts"
_WITHIN = {"filter": "filters", "about": "which mail"}
"""How a struct within a request is called."""
_TIME_HELP = "+2h, 23:30, or 2026-11-25T23:30 (local time, or with an offset)"


# --- values -------------------------------------------------------------------------------------------------


def _read(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Wrap a parser of an argument so that argparse prints the message of its ValueError unchanged."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


def _period(text: str) -> float:
    """Parse a duration that is short enough to be added to the current date."""
    if (seconds := parse_duration(text)) > LONGEST:
        raise ValueError(f"{text!r} is longer than 100 years")
    return seconds


_duration = _read(_period)


def _size(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else parse_size(text)


def _time(text: str) -> float:
    """Parse a time in the future: a duration from now, a time of day, or an ISO 8601 time (local without an
    offset).
    """
    now = datetime.now().astimezone()
    try:
        if text.startswith("+"):
            return now.timestamp() + parse_duration(text[1:])
        if len(text) <= len("HH:MM:SS"):
            at = datetime.combine(now.date(), time.fromisoformat(text))
            at += timedelta(days=at.astimezone() <= now)
        else:
            at = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a time; expected {_TIME_HELP}") from error
    if at.timestamp() <= now.timestamp():
        raise ValueError(f"{text!r} is in the past")
    return at.timestamp()


def _ip(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError as error:
        raise ValueError(f"{text!r} is not an IP address") from error


def _fingerprint(text: str) -> str:
    digits = text.replace(":", "").lower()
    if not re.fullmatch("[0-9a-f]{64}", digits):
        raise ValueError(f"{text!r} is not a SHA-256 fingerprint of 64 hexadecimal digits")
    return digits


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not (colon and name.strip() and text.isprintable()):
        raise ValueError(f'{text!r} is not a header field; expected "Name: value"')
    return name.strip(), value.strip()


def _message_id(text: str) -> str:
    if not is_message_id(text):
        raise ValueError(
            f"{text!r} is not a message id; expected 16 hexadecimal digits as shown by `zonerelay queue list`"
        )
    return text


_BY_UNIT: dict[str, Callable[[str], Any]] = {
    "DURATION": parse_duration,
    "AGO": lambda text: datetime.now().timestamp() - _period(text),
    "TIME": _time,
    "SIZE": _size,
    "MESSAGE_ID": _message_id,
    "IP": _ip,
    "FINGERPRINT": _fingerprint,
    "HEADER": _header,
}
"""By the name of an `operations.operation.Unit`, which commands without an operation do not load."""


def _number(least: int = 0, most: int = 2**31) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
            raise ValueError(f"{text!r} is not a number from {least} to {most}")
        return int(text)

    return _read(number)


def _worker(text: str) -> int:
    from zonerelay.config.settings import MAX_WORKERS

    return _number(0, MAX_WORKERS - 1)(text)


def _token_name(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", text) and text != "token_file":
        return text
    raise ValueError("a name may have up to 64 letters, digits and . _ @ -")


def _tcp_address(text: str) -> str:
    from zonerelay.config.endpoints import parse_listen

    if parse_listen(text).is_unix:
        raise ValueError("expected an address and a port, such as 127.0.0.1:25")
    return text


# --- the table ----------------------------------------------------------------------------------------------


class Command(msgspec.Struct):
    """A command of `zonerelay`, with its function and its options. `run` names a function of a module below
    `zonerelay.cli`. If `help` is "", the command is an operation.
    """

    words: str
    run: str
    help: str = ""
    arguments: list[tuple[str, dict[str, Any]]] = msgspec.field(default_factory=list)
    operations: tuple[Operation, ...] = ()
    has_config: bool = True
    has_filters: bool = False

    @property
    def top(self) -> str:
        return self.words.partition(" ")[0]

    def value(self, name: str, metavar: str, text: str, of: Parse = str, **options: Any) -> Command:
        self.arguments.append((name, {"metavar": metavar, "help": text, "type": of, **options}))
        return self

    def choice(self, name: str, choices: Sequence[str], text: str, **options: Any) -> Command:
        self.arguments.append((name, {"choices": choices, "help": text, **options}))
        return self

    def flag(self, name: str, text: str, **options: Any) -> Command:
        """Add an option without a value. Only one flag of a `group` may be given."""
        self.arguments.append((name, {"action": "store_true", "help": text, **options}))
        return self

    def json(self) -> Command:
        return self.flag("--json", _JSON_HELP)

    def password(self) -> Command:
        self.flag("--password-stdin", "Read the password from standard input", group="password")
        return self.flag("--generate", "Generate a random password and print it once", group="password")


def _change(verb: str) -> Command:
    command = Command(f"queue {verb}", "operate.queue:change")
    return command.flag("--yes", "Do not ask for confirmation (for scripts)")


def _user(verb: str, text: str) -> Command:
    command = Command(f"user {verb}", "setup.credentials:user", text)
    command.value("--file", "FILE", "Credentials file (default: [auth] credentials)", Path)
    return command if verb in ("list", "default") else command.value("name", "NAME", "User name")


_SENDERS = "user@example.com, example.com, *.example.com, bounce-*@example.com"
_KEYS = (
    "for example recipients=example.com,*.example.com or messages_per_hour=500; see docs/send/users.md for "
    "all keys"
)
_SCOPES = "read: view; operate: view, change the queue, read bodies; submit: submit mail"

GROUPS: dict[str, tuple[Command, ...]] = {
    "Run": (
        Command("serve", "main:serve", "Run the relay in the foreground"),
        Command("worker", "main:serve", "Run one worker of a relay with several workers")
        .value("--index", "N", "Number of the worker, from 0", _read(_worker), required=True)
        .flag("--drain", "Drain the spool of a removed worker", dest="drains_spool"),
        Command("sandbox", "main:sandbox", "Run a relay with a test receiver", has_config=False)
        .value("--listen", "ADDRESS", "Accept mail here (default: 127.0.0.1:2525)", _read(_tcp_address))
        .value("--page", "ADDRESS", "Serve page and API (default: 127.0.0.1:8025)", _read(_tcp_address))
        .flag("--open", "Allow non-loopback addresses: anyone can send and read mail")
        .value("--release-to", "ADDRESS", "Server for released captured mail", _read(_tcp_address)),
        Command("version", "main:version", "Print the version", has_config=False),
    ),
    "Look": (
        Command("status", "operate.status:status")
        .flag("--all", "Include destinations without mail")
        .flag("--watch", "Refresh every 2 seconds, until q or Ctrl-C"),
        Command("tail", "operate.tail:tail"),
        Command("explain", "operate.explain:explain"),
        Command("transcript", "operate.tail:transcript")
        .value("--out", "FILE", "Write to this file, readable only by you", Path),
        Command("log find", "operate.log:find")
        .value("--limit", "N", "At most N rows (default: %(default)s)", _number(1), dest="rows", default=100),
        Command("log show", "operate.log:show"),
        Command("log forget", "operate.log:forget_address", "Overwrite an address in the history")
        .value("address", "ADDRESS", "Address or its pseudonym"),
        Command("report", "operate.log:report", "Print the daily report for the time until now")
        .value("--since", "AGE", "Period of the report (default: 1d)", _duration, default=86_400.0),
        Command("resolve", "operate.queue:resolve"),
    ),
    "Change": (
        Command("queue list", "operate.queue:list_deliveries")
        .value("--limit", "N", "At most N rows; 0 for all (default: 1000, all with --json)", _number()),
        Command("queue summary", "operate.queue:summary")
        .value("--limit", "N", "At most N rows in the table; 0 for all (default: 20)", _number()),
        Command("queue show", "operate.queue:show"),
        Command("queue trace", "operate.queue:trace"),
        Command("queue cat", "operate.queue:cat"),
        *map(_change, ("retry", "hold", "release", "reroute", "bounce", "drop")),
        Command("suspend", "operate.queue:suspend")
        .flag("--hold", "Hold each delivery, to be released individually")
        .flag("--list", "List active suspensions"),
        Command("resume", "operate.queue:resume"),
        Command("acts", "operate.queue:acts"),
        Command("undo", "operate.queue:undo"),
        *(Command(f"webhook {verb}", "operate.responses:show") for verb in ("list", "test", "replay")),
        Command("sendmail", "", "Submit a message, like sendmail(1)", has_config=False),
    ),
    "People": (
        _user("add", "Add a user and prompt for the password")
        .value("--sender", "PATTERN", f"Allowed sender, repeatable: {_SENDERS}", action="append", default=[])
        .choice("--priority", PRIORITIES, "Priority of the user's mail (default: the listener's)", default="")
        .password(),
        _user("show", "Show a user with its limits and usage").json(),
        _user("set", "Set the senders, priority and limits of a user")
        .value("assignment", "KEY=VALUE", f"KEY= unsets a value; {_KEYS}", nargs="+"),
        _user("passwd", "Change the password of a user").password(),
        _user("rotate", "Add a second password; --finish removes the old one")
        .flag("--finish", "Remove the old password")
        .password(),
        _user("disable", "Reject the logins and the mail of a user"),
        _user("enable", "Allow the user to log in again"),
        _user("list", "List the users and their allowed senders").json(),
        _user("remove", "Remove a user"),
        _user("default", "Show or set the limits of users without their own limits")
        .value("assignment", "KEY=VALUE", _KEYS, nargs="*"),
        Command("token add", "setup.credentials:token", "Create an API token and print it once")
        .value("name", "NAME", "Name of the token, as shown in the log", _read(_token_name))
        .choice("--scope", ("read", "operate", "submit"), _SCOPES, required=True)
        .value("--user", "NAME", "User whose mail the token submits", default="")
        .value("--for", "AGE", "Lifetime, e.g. 90d (default: unlimited)", _duration, dest="lifetime"),
        Command("token list", "setup.credentials:token", "List the tokens (never their secret part)").json(),
        Command("token remove", "setup.credentials:token", "Remove a token")
        .value("name", "NAME", "Name of the token", _read(_token_name)),
    ),
    "Spool": (
        Command("spool acknowledge", "spool.state:acknowledge"),
        Command("spool check", "spool.state:check", "Read the whole spool and report damage")
        .value("--tmp", "DIR", "Directory for a copy (default: next to the spool)", Path)
        .json(),
        Command("spool repair", "spool.state:repair", "Repair the spool of a stopped relay")
        .flag("--yes", "Carry out the repair")
        .flag("--dry-run", "Only report what would be done (the default)")
        .value("--salvage", "DIR", "Directory for unrepairable data (default: next to the spool)", Path)
        .json(),
        Command("spool backup", "spool.copies:backup", "Back up the queue of a running relay")
        .value("path", "DIR", "New directory", Path)
        .json(),
        Command("spool restore", "spool.copies:restore", "Restore a backup into an empty spool")
        .value("path", "DIR", "Directory of the backup", Path),
        Command("spool export", "spool.copies:export_to", "Copy mail of a stopped relay", has_filters=True)
        .value("path", "DIR|FILE.tar", "New directory or file", Path)
        .json(),
        Command("spool import", "spool.copies:import_from", "Import mail into a stopped relay")
        .value("place", "SOURCE", "DIR or FILE.tar of `spool export`; with --from, its queue")
        .choice("--from", SYSTEMS, "The other system, which must be stopped", dest="system")
        .json(),
        Command("spool migrate", "spool.migrate:migrate", "Move the queue to another configuration")
        .value("--to", "OTHER.toml", "Configuration of the other relay", Path, required=True)
        .json(),
        Command("spool is-empty", "spool.state:is_empty", "Print the directories of a spool if it is empty"),
        Command("spool accept-empty", "spool.state:accept_empty", "Accept that a shared store is now empty"),
        Command("outbox status", "operate.outbox:status", "Count the outbox rows by status").json(),
        Command("outbox schema", "operate.outbox:schema", "Print the SQL of the tables and their privileges"),
        Command("outbox encrypt-password", "operate.outbox:encrypt", "Encrypt the password of a mailbox")
        .value("--host", "HOST", "smtp_host of the mailbox", required=True)
        .value("--port", "PORT", "smtp_port of the mailbox (default: %(default)s)", _number(), default=587)
        .value("--user", "NAME", "Its smtp_username", required=True),
    ),
    "Set up": (
        Command("init", "setup.init:init", "Write a configuration and systemd units", has_config=False)
        .value("directory", "DIR", "Target directory; existing files are not overwritten", Path),
        Command("check-config", "setup.config:check_config", "Check a configuration"),
        Command("config show", "setup.config:show", "Print the configuration as TOML")
        .flag("--changed", "Print only options that differ from the defaults", group="which")
        .flag("--defaults", "Print the defaults, ignoring the file", group="which")
        .json(),
        Command("cert self-signed", "setup.keys:self_signed", "Create a self-signed certificate")
        .value("--name", "NAME", "Name or address, repeatable (default: the hostname)", action="append")
        .value("--out", "DIR", "Directory for NAME.pem and NAME.key (default: .)", Path, default=Path())
        .value("--days", "N", "Days of validity (default: %(default)s)", _number(1, MAX_DAYS), default=DAYS)
        .flag("--force", "Replace existing files")
        .json(),
        Command("dkim new", "setup.keys:new", "Create a DKIM key and print its DNS record", has_config=False)
        .value("--domain", "DOMAIN", "Signing domain, as in From", required=True)
        .value("--selector", "NAME", 'Selector, e.g. "s2026"; use a new one for each key', required=True)
        .choice("--algorithm", ("rsa", "ed25519"), "rsa (default) has 2048 bits", default="rsa")
        .value("--out", "FILE", "File for the private key", Path, required=True)
        .json(),
        Command("dkim check", "setup.keys:check", "Compare every key with its DNS record").json(),
    ),
}  # fmt: skip
"""The commands by what they are for."""

_TOPS = {
    "serve": "Run the relay", "worker": "Run a single worker",
    "sandbox": "Try the relay safely", "version": "Print the version",
    "status": "Show the relay's state", "tail": "Follow mail events",
    "explain": "Explain a route", "transcript": "Record sessions",
    "log": "Search the history", "report": "Print the report",
    "resolve": "Look up a pseudonym",
    "queue": "Manage the queue", "suspend": "Suspend sending",
    "resume": "End suspensions", "acts": "List changes",
    "undo": "Revert a change", "webhook": "Manage webhooks",
    "sendmail": "Submit a message",
    "user": "Manage users", "token": "Manage API tokens",
    "spool": "Check and move the spool", "outbox": "Manage the outbox",
    "init": "Write a configuration", "check-config": "Check a configuration",
    "config": "Print the configuration", "cert": "Create a certificate",
    "dkim": "Manage DKIM keys",
}  # fmt: skip
"""Each command in a few words, for the overview."""


# --- parsers ------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. On a mistake, print the usage and exit with status 2, as argparse does."""
    words = sys.argv[1:] if arguments is None else arguments
    root = build(words)
    found, rest = root.parse_known_args(words)
    parser: argparse.ArgumentParser = vars(found).pop("parser", root)
    if rest and rest[0].startswith("-"):
        near = _near(rest[0].partition("=")[0], parser._option_string_actions)
        parser.error(f"unknown option {rest[0]}{near}")
    elif rest:
        parser.error(f"unexpected argument {rest[0]}")
    return found


class _Parser(argparse.ArgumentParser):
    """An argument parser that suggests similar names for unknown options."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            there = list(map(str, action.choices))
            near = _near(value, there) or f"; must be one of {', '.join(there)}"
            raise argparse.ArgumentError(action, f"unknown value {value!r}{near}")


def _near(word: str, known: Iterable[str]) -> str:
    from zonerelay.config.problems import did_you_mean

    return did_you_mean(word, known)


def build(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the argparse parser of all commands, or only of those to which these arguments may refer."""
    commands = _meant(words)
    parser = _Parser(
        prog="zonerelay",
        usage="zonerelay [-h] [--version] COMMAND ...",
        description=f"{DESCRIPTION}\n\n{_overview()}",
        epilog=f"See `zonerelay COMMAND --help` for subcommands and options.\n{EXIT_STATUS}",
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    version = f"zonerelay {__version__}"
    parser.add_argument("--version", action="version", version=version, help=argparse.SUPPRESS)
    # The description lists the commands, in groups.
    tops = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", prog="zonerelay", help=argparse.SUPPRESS
    )
    groups: dict[str, Any] = {}
    for command in commands:
        top, _, verb = command.words.partition(" ")
        if verb and top not in groups:
            group = tops.add_parser(top, help=_TOPS[top], description=f"{_TOPS[top]}.", allow_abbrev=False)
            groups[top] = group.add_subparsers(dest="verb", required=True, metavar="VERB")
        _add(groups[top] if verb else tops, verb or top, command)
    return parser


def _meant(words: Sequence[str]) -> list[Command]:
    known = [each for commands in GROUPS.values() for each in commands]
    for length in (2, 1):
        # Set-up commands need nothing from the catalogue, and are faster to start without it.
        found = [each for each in known if each.words == " ".join(words[:length])]
        if found and found[0].help:
            return found
    every = list(_completed(known))
    for prefix in (list(words[:2]), list(words[:1])):
        if found := [each for each in every if prefix and each.words.split()[: len(prefix)] == prefix]:
            return found
    return every


def _completed(known: Iterable[Command]) -> Iterator[Command]:
    """Yield the commands, each with the operations from `operations.catalogue` that it can request. Commands
    that only the catalogue defines follow the others of their group.
    """
    from zonerelay.operations.catalogue import OPERATIONS

    of: dict[str, tuple[Operation, ...]] = {}
    for each in OPERATIONS:
        if each.command:
            of[each.command] = (*of.get(each.command, ()), each)
    known = list(known)
    for number, command in enumerate(known):
        operations = of.pop(command.words, ())
        yield structs.replace(command, help=command.help or operations[-1].help, operations=operations)
        if all(each.top != command.top for each in known[number + 1 :]):
            for words in [words for words in of if words.partition(" ")[0] == command.top]:
                operations = of.pop(words)
                yield Command(words, "operate.responses:show", operations[0].help, operations=operations)


def _overview() -> str:
    """Return the list of commands for the help: two per line, so that it fits a terminal of 80 x 24."""
    lines = []
    for title, group in GROUPS.items():
        tops = [f"{top:<13}{_TOPS[top]:<25}" for top in dict.fromkeys(each.top for each in group)]
        for at in range(0, len(tops), 2):
            lines.append(f"{'' if at else title:<8}{''.join(tops[at : at + 2])}".rstrip())
    return "\n".join(lines)


def _add(commands: Any, name: str, command: Command) -> None:
    parser = commands.add_parser(
        name,
        help=command.help,
        description=f"{command.help}.",
        allow_abbrev=False,
        add_help=command.run != "",
    )
    parser.set_defaults(run=command.run, parser=parser)
    groups: dict[str, Any] = {"": parser}
    for argument, options in command.arguments:
        group = options.get("group", "")
        if group not in groups:
            groups[group] = parser.add_mutually_exclusive_group()
        groups[group].add_argument(argument, **{key: each for key, each in options.items() if key != "group"})
    for operation in reversed(command.operations):
        _add_fields(parser, operation, optional=len(command.operations) > 1)
    if command.has_filters:
        from zonerelay.operations.catalogue import BY_NAME

        _add_fields(parser, BY_NAME["queue-count"])
    if command.operations:
        parser.add_argument("--json", action="store_true", help=_JSON_HELP)
    if command.has_config:
        parser.add_argument("--config", type=Path, metavar="FILE", help=_CONFIG_HELP)
    if any(each.path and each.reply for each in command.operations):
        text = "Control socket of the relay (overrides the configuration)"
        parser.add_argument("--socket", type=Path, metavar="PATH", help=text)


def _add_fields(parser: argparse.ArgumentParser, operation: Operation, *, optional: bool = False) -> None:
    """Add an argument for each field of a request that users can set, unless the command already has one."""
    from zonerelay.operations.operation import fields_of

    taken = {action.dest for action in parser._actions} | parser._option_string_actions.keys()
    groups: dict[str, Any] = {"": parser}
    for each in fields_of(operation.request):
        if {_dest(each), each.option.flag} & taken or not (each.option.flag or each.option.positional):
            continue
        within = "one-of" if each.name in operation.one_of else each.within
        if within not in groups and within == "one-of":
            groups[within] = parser.add_mutually_exclusive_group(required=True)
        elif within not in groups:
            text = "All given conditions must match; * matches any text. Quote * in a shell."
            groups[within] = parser.add_argument_group(_WITHIN[within], text)
        options = _options(each)
        if each.option.positional:
            if optional or not each.required:
                options["nargs"] = "*" if options.pop("action", "") else "?"
            groups[within].add_argument(_dest(each), **options)
        else:
            flag = (operation.flags or {}).get(_dest(each), each.option.flag)
            groups[within].add_argument(flag, dest=_dest(each), **options)


def _dest(described: FieldDescription) -> str:
    return f"{described.within}.{described.name}" if described.within else described.name


def _options(described: FieldDescription) -> dict[str, Any]:
    """Return the keyword arguments of argparse's `add_argument` for a request field."""
    unit, default = described.option.unit, described.default
    if described.type is bool:
        return {"action": "store_true", "help": described.help}
    if default and unit is not None:
        default = {"DURATION": format_duration, "SIZE": format_size}[unit.name](default)
    options: dict[str, Any] = {
        "help": (described.help + (f" (default: {default})" if default else "")).replace("%", "%%")
    }
    if described.choices:
        return {**options, "choices": described.choices}
    if unit is not None:
        options["type"] = _read(_BY_UNIT[unit.name])
        if get_origin(described.type) is tuple:
            options["action"] = "append"
    elif described.type is int:
        options["type"] = _number()
    return {**options, "metavar": described.option.metavar}


# --- requests -----------------------------------------------------------------------------------------------


def request_of(arguments: argparse.Namespace, request: type[R], **more: object) -> R:
    """Return the request that the command line describes, with the additional fields `more`. Raise CliError
    if it is not valid.
    """
    from zonerelay.operations.operation import fields_of

    values: dict[str, Any] = {}
    flags = {}
    for each in fields_of(request):
        value = getattr(arguments, _dest(each), None)
        place = values.setdefault(each.within, {}) if each.within else values
        if value is not None and value is not False:
            place[each.name] = value
        flags[_dest(each)] = each.option.flag or each.option.metavar
    for name, value in more.items():
        values[name] = {**values.get(name, {}), **value} if isinstance(value, dict) else value
    try:
        return msgspec.convert(values, request)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$.")
        raise CliError(f"{flags.get(place.rstrip('`'), place)}: {what}", USAGE) from error
