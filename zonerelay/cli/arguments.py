"""The grammar of the command line: every command, option and help text. The module imports nothing heavy.

`parse` returns a namespace whose `command` names the command. Values have the types that commands need
(durations in seconds, a control Filter), so argparse reports a mistake before a command does anything.
"""

from __future__ import annotations

import argparse
import ipaddress
import re
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from zonerelay import __version__
from zonerelay.config.endpoints import parse_listen
from zonerelay.config.units import parse_duration, parse_size
from zonerelay.model.delivery import DeliveryState
from zonerelay.model.message_id import is_message_id
from zonerelay.model.queue_name import Priority

if TYPE_CHECKING:
    import msgspec

    from zonerelay.operations.requests import Filter

    # argparse has no public name for what add_subparsers returns.
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

R = TypeVar("R", bound="msgspec.Struct")

DEFAULT_ROWS = 1000
DEFAULT_FOUND = 100
DEFAULT_DAYS = 825  # what Apple's systems take at most
MAX_DAYS = 36_500

_CONFIG_HELP = (
    "configuration file; without it $ZONERELAY_CONFIG, /etc/zonerelay/zonerelay.toml "
    "or ./config/zonerelay.toml, the first that there is"
)
_ASKING = (
    "status", "queue", "acts", "undo", "suspend", "resume", "tail", "transcript", "explain", "resolve",
    "webhook", "spool acknowledge",
)  # fmt: skip
"""Commands that ask a running relay."""
_FILTER_HELP = "Everything given must match; * stands for any text. Quote it from the shell."
_AT_HELP = "+2h, 23:30, or 2026-11-25T23:30 (local time, or with an offset)"
_EXIT_HELP = "Exit status: 0 done, 1 not possible or not found, 2 usage or configuration."

SYSTEMS = ("postfix", "exim", "zonemta", "slimta-redis", "slimta-disk", "slimta-lua")
"""Whose queues `spool import --from` reads."""

SCOPES = ("read", "operate", "submit")
"""Of tokens; `config.credentials.identities` has them as a type."""

SUMMARIES = ("domain", "site", "sender", "zone", "user", "reply", "priority")
OUTCOMES = ("waiting", "delivered", "deferred", "bounced", "expired", "dropped", "refused")
"""Of mail, as `zonerelay log find` has them; `history.reader` loads more than a parser should."""

CHANGES = {
    "retry": "try deliveries again now, whatever their schedule says",
    "hold": "keep deliveries in the queue and do not try them until released; survives restarts",
    "release": "let held deliveries go on",
    "reroute": "send deliveries another way: through another zone of the configuration",
    "bounce": "give deliveries up and report to their senders",
    "drop": "remove deliveries for good, without a report to their senders",
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Exits with status 2 and a usage text on a mistake, as argparse does."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = build(relay_alone=bool(words) and words[0] in ("serve", "worker"))
    parsed = parser.parse_args(arguments)
    if parsed.command == "explain" and not (parsed.address or parsed.message_id):
        parser.error("explain: the following arguments are required: ADDRESS, or --id ID")
    return parsed


def build(*, relay_alone: bool = False) -> argparse.ArgumentParser:
    """With `relay_alone` the commands that are a relay: all the others take a tenth of its start to build."""
    parser = argparse.ArgumentParser(
        prog="zonerelay",
        description="An SMTP relay that never loses what it acknowledged.",
        epilog=_EXIT_HELP,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"zonerelay {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _command(commands, "serve", "run the relay in the foreground")
    worker = _command(commands, "worker", "run one worker, as serve does with several; by hand to debug it")
    worker.add_argument("--index", type=_worker, required=True, metavar="N", help="which one, from 0")
    worker.add_argument(
        "--heir", dest="drains_spool", action="store_true", help="empty the spool of a worker that is no more"
    )
    if relay_alone:
        return parser
    init = commands.add_parser(
        "init",
        help="write a configuration and systemd units to begin with",
        description="Write zonerelay.toml, zonerelay.service and zonerelay.socket into DIR, with paths that "
        "fit it: everything lies in DIR, or, below /etc, where a service keeps it. It overwrites nothing.",
        allow_abbrev=False,
    )
    init.add_argument("directory", type=Path, metavar="DIR")
    _command(commands, "check-config", "check the configuration file and say everything that is wrong")
    _configuration(commands)
    status = _command(commands, "status", "what the running relay is doing")
    status.add_argument("--all", action="store_true", help="all destinations, also those without mail")
    status.add_argument("--watch", action="store_true", help="look again every 2 seconds, until q or Ctrl-C")
    _json(status)
    _queue(commands)
    _orders(commands)
    _explain(commands)
    _log(commands)
    report = _command(commands, "report", "what became of mail, in figures, as the daily report has it")
    report.add_argument(
        "--since", type=_age, default=86_400.0, metavar="AGE", help="of that time until now (default: 1d)"
    )
    _acts(commands)
    resolve = _command(
        commands, "resolve", "addresses in the queue behind a pseudonym from the log; or its pseudonym"
    )
    resolve.add_argument(
        "pseudonym",
        metavar="PSEUDONYM|ADDRESS",
        help="u-…@d-… for a mailbox, d-… for every mailbox of a domain; an address gets its pseudonym",
    )
    _json(resolve)
    _live(commands)
    _user(commands)
    _token(commands)
    _certificates(commands)
    _dkim(commands)
    _outbox(commands)
    _webhook(commands)
    _spool(commands)
    commands.add_parser("sendmail", help="hand in mail as sendmail(1) does", add_help=False)
    _sandbox(commands)
    commands.add_parser("version", help="print the version")
    return parser


def _sandbox(commands: Commands) -> None:
    text = "relay and scriptable sink on loopback: watch mail flow, and look at what was sent"
    sandbox = commands.add_parser("sandbox", help=text, description=f"{text.capitalize()}.")
    sandbox.add_argument(
        "--release-to", metavar="ADDRESS", type=_smtp_address,
        help='let captured mail be released to this SMTP server, such as 127.0.0.1:25 (never, without)',
    )  # fmt: skip


def _command(commands: Commands, name: str, help_text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=help_text, description=help_text[0].upper() + help_text[1:] + ".", allow_abbrev=False
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help=_CONFIG_HELP)
    if parser.prog.partition(" ")[2].startswith(_ASKING):
        parser.add_argument(
            "--socket", type=Path, metavar="PATH", help="control socket of the relay, whatever the file says"
        )
    return parser


def _verbs(commands: Commands, name: str, help_text: str) -> Commands:
    parser = commands.add_parser(name, help=help_text)
    return parser.add_subparsers(dest="verb", required=True, metavar="VERB")


def _reason(parser: argparse.ArgumentParser, told: str = "for the log") -> None:
    parser.add_argument("--reason", type=_one_line, default="", metavar="TEXT", help=told)


def _id(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("message_id", type=_message_id, metavar="ID", help="message id, as in the log")


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for scripts; see docs/operating.md")


def _queue(commands: Commands) -> None:
    verbs = _verbs(commands, "queue", "look at the queue and change it")
    listing = _command(verbs, "list", "list deliveries, oldest message first")
    _filters(listing)
    listing.add_argument(
        "--limit",
        type=_count,
        metavar="N",
        help=f"at most N rows, 0 for all (default: {DEFAULT_ROWS} in a table, all with --json)",
    )
    _json(listing)
    summary = _command(verbs, "summary", "count deliveries by a property and by age, the most first")
    summary.add_argument("--by", choices=SUMMARIES, default="domain", help="of what (default: %(default)s)")
    _filters(summary)
    summary.add_argument(
        "--exact", action="store_true", help="look at every delivery, also where there are many"
    )
    summary.add_argument(
        "--limit", type=_count, metavar="N", help="at most N rows in the table, 0 for all (default: 20)"
    )
    _json(summary)
    for name, help_text in (
        ("show", "one message: envelope, headers and the state of each recipient"),
        ("trace", "one message: what happened to it so far and what comes next"),
    ):
        one = _command(verbs, name, help_text)
        _id(one)
        _json(one)
    cat = _command(verbs, "cat", "one message: its header and body, on standard output; the log tells of it")
    _id(cat)
    cat.add_argument("--as-sent", action="store_true", help="with what its zone changes in it, and signed")
    cat.add_argument("--zone", help="with --as-sent, for a message that is in several zones")
    _json(cat)
    for name, help_text in CHANGES.items():
        _change(verbs, name, help_text)


def _change(verbs: Commands, name: str, help_text: str) -> None:
    parser = _command(verbs, name, help_text)
    parser.add_argument("message_ids", type=_message_id, nargs="*", metavar="ID", help="message ids")
    if name == "retry":
        parser.add_argument("--at", type=_at, metavar="TIME", help=f"not now, but then: {_AT_HELP}")
    if name == "reroute":
        aim = parser.add_mutually_exclusive_group(required=True)
        aim.add_argument("--zone", dest="to_zone", metavar="TARGET", help="to this zone")
        aim.add_argument("--next-hop", metavar="HOST", help="to the zone that has this next_hop")
        aim.add_argument("--ask-again", action="store_true", help="to the zone that the routes choose now")
    _filters(parser, "--from-zone" if name == "reroute" else "--zone")
    parser.add_argument("--all", action="store_true", help="the whole queue, when no filter is given")
    parser.add_argument("--yes", action="store_true", help="do not ask, which scripts need")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
    told = "told to the senders in the report, and in the log" if name == "bounce" else "for the log"
    _reason(parser, told)
    _json(parser)


def _acts(commands: Commands) -> None:
    acts = _command(commands, "acts", "what operators have changed in the last 24 hours, the last one first")
    acts.add_argument("--limit", type=_count, default=100, metavar="N", help="(default: %(default)s)")
    _json(acts)
    undo = _command(commands, "undo", "revert what an act of the last 24 hours has changed, and only that")
    undo.add_argument("act", nargs="?", metavar="ID", help="the id of the act, which its command printed")
    undo.add_argument("--list", action="store_true", help="as zonerelay acts")
    _reason(undo)
    undo.add_argument("--limit", type=_count, default=100, help=argparse.SUPPRESS)
    _json(undo)


def _filters(parser: argparse.ArgumentParser, zone: str = "--zone") -> None:
    group = parser.add_argument_group("filters", _FILTER_HELP)
    group.add_argument("--sender", metavar="ADDRESS", help="envelope sender; <> for the null sender")
    group.add_argument("--recipient", metavar="ADDRESS")
    group.add_argument("--domain", help="recipient domain")
    group.add_argument(zone, dest="zone", metavar="ZONE")
    group.add_argument("--priority", choices=[each.value for each in Priority])
    group.add_argument("--state", choices=[state.value for state in DeliveryState])
    group.add_argument(
        "--older-than", dest="min_age", type=_age, metavar="AGE", help="accepted longer ago, e.g. 30m, 4h, 2d"
    )
    group.add_argument("--younger-than", dest="max_age", type=_age, metavar="AGE")
    group.add_argument("--reply", dest="reply_text", metavar="TEXT", help="the last reply contains this text")


def _orders(commands: Commands) -> None:
    suspend = _command(commands, "suspend", "keep mail from being sent, also mail to come, until resumed")
    _selectors(suspend)
    suspend.add_argument("--hold", action="store_true", help="as a hold rule: each can be released by itself")
    suspend.add_argument("--for", dest="seconds", type=_age, metavar="AGE", help="ends by itself, e.g. 2h")
    suspend.add_argument("--refuse", action="store_true", help="clients get 421 instead: they try again")
    suspend.add_argument("--stop-clock", action="store_true", help="the mail gets no older meanwhile")
    _reason(suspend, "for other operators")
    suspend.add_argument("--list", action="store_true", help="show the orders in force")
    _json(suspend)
    resume = _command(commands, "resume", "end orders, and let go what they held")
    resume.add_argument(
        "order", nargs="?", default="", metavar="ORDER", help="id, as suspend --list shows it"
    )
    _selectors(resume)
    _reason(resume)
    _json(resume)


def _selectors(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("which mail", _FILTER_HELP)
    group.add_argument("--zone")
    group.add_argument("--destination", metavar="NAME", help="a destination or host, as status shows it")
    group.add_argument("--domain", help="recipient domain")
    group.add_argument("--sender", metavar="ADDRESS", help="envelope sender; <> for the null sender")
    group.add_argument("--user", metavar="NAME", help="user who had logged in")
    group.add_argument("--recipient", metavar="ADDRESS")
    group.add_argument("--all", action="store_true", help="all mail, instead")


def _configuration(commands: Commands) -> None:
    verbs = _verbs(commands, "config", "the configuration, with its defaults")
    show = _command(verbs, "show", "print every option as it is in force, in a form that can be read back")
    which = show.add_mutually_exclusive_group()
    which.add_argument("--changed", action="store_true", help="only what differs from the defaults")
    which.add_argument("--defaults", action="store_true", help="the defaults, whatever the file says")
    _json(show)


def _log(commands: Commands) -> None:
    verbs = _verbs(commands, "log", "what became of mail: the history")
    find = _command(verbs, "find", "find what became of mail, the newest last; everything given must match")
    find.add_argument(
        "value",
        nargs="?",
        metavar="ADDRESS|MESSAGE-ID|ID",
        help="sender or recipient, @DOMAIN, Message-ID, message id, pseudonym, user or client",
    )
    find.add_argument("--since", type=_age, metavar="AGE", help="not longer ago, e.g. 30m, 4h, 2d")
    find.add_argument("--until", type=_age, metavar="AGE", help="at least so long ago")
    find.add_argument("--sender", metavar="ADDRESS", help="<> for the null sender")
    find.add_argument("--recipient", metavar="ADDRESS")
    find.add_argument("--client", metavar="IP")
    find.add_argument("--user", metavar="NAME", help="user who had logged in")
    find.add_argument("--zone")
    find.add_argument("--destination", metavar="NAME", help="destination or host; * stands for any text")
    find.add_argument(
        "--reply", metavar="TEXT", help="the reply to an attempt, or of ours, contains this text"
    )
    find.add_argument("--outcome", choices=OUTCOMES, help="waiting: no attempt yet")
    find.add_argument(
        "--limit", type=_count, default=DEFAULT_FOUND, metavar="N", help="the newest N (default: %(default)s)"
    )
    _json(find)
    show = _command(verbs, "show", "everything that is known of one message, as a time line")
    _id(show)
    _json(show)
    forget = _command(verbs, "forget", "write over an address wherever the history has it")
    forget.add_argument("address", metavar="ADDRESS")


def _explain(commands: Commands) -> None:
    explain = _command(commands, "explain", "say how mail for an address would travel; sends nothing")
    explain.add_argument(
        "address", nargs="?", default="", metavar="ADDRESS", help="recipient; a bare domain will do"
    )
    explain.add_argument(
        "--id", dest="message_id", type=_message_id, metavar="ID", help="where a message of the queue goes"
    )
    explain.add_argument("--from", dest="sender", default="", metavar="ADDRESS", help="envelope sender")
    mail = explain.add_argument_group(
        "about the mail", "Routes that ask for one of these match only if it is given."
    )
    mail.add_argument("--user", default="", metavar="NAME", help="user who has logged in")
    mail.add_argument("--listener", default="", metavar="ADDRESS", help="where it came in")
    mail.add_argument("--client", type=_ip, metavar="IP", help="address of the client")
    mail.add_argument("--certificate", type=_fingerprint, metavar="SHA256", help="shown by the client")
    mail.add_argument("--priority", choices=[each.value for each in Priority])
    mail.add_argument("--size", type=_size, metavar="SIZE", help="of the message, e.g. 12 MB")
    mail.add_argument(
        "--header",
        type=_header,
        action="append",
        default=[],
        metavar="FIELD",
        help='a header field, "Name: value"; may be repeated',
    )
    _json(explain)


def _live(commands: Commands) -> None:
    tail = _command(commands, "tail", "what happens to mail, as it happens, until Ctrl-C")
    tail.add_argument(
        "address",
        nargs="?",
        default="",
        metavar="VALUE",
        help="an address, a client, a user, a Message-ID or an id",
    )
    for name, metavar, what in (
        ("from", "ADDRESS", "messages of this sender, with what becomes of them; @example.com: of a domain"),
        ("to", "ADDRESS", "about this recipient; @example.com: about a domain"),
        ("domain", "DOMAIN", "about recipients in a domain, or sent to this destination"),
        ("zone", "NAME", "in a zone"),
        ("user", "NAME", "messages of a user who has logged in"),
        ("client", "ADDRESS", "messages and refusals of a client"),
        ("event", "NAMES", "events of these names, with commas between: deferred,bounced"),
        ("id", "ID", "about one message"),
    ):
        field = {"from": "sender", "to": "recipient", "id": "message_id"}.get(name, name)
        tail.add_argument(f"--{name}", dest=field, default="", metavar=metavar, help=what)
    _json(tail)
    transcript = _command(commands, "transcript", "what a client or a host and the relay say, as they say it")
    subject = transcript.add_mutually_exclusive_group(required=True)
    subject.add_argument(
        "--client", default="", metavar="ADDRESS", help="sessions of a client, or of a network"
    )
    subject.add_argument(
        "--domain", default="", metavar="DOMAIN", help="connections to a domain, an MX host or a next hop"
    )
    subject.add_argument(
        "--id", dest="message_id", type=_message_id, metavar="ID", help="attempts of one message"
    )
    transcript.add_argument(
        "--for", dest="seconds", type=_age, default=300.0, metavar="TIME", help="ends after it (default: 5m)"
    )
    transcript.add_argument(
        "--size",
        dest="octets",
        type=_size,
        default=10_000_000,
        metavar="SIZE",
        help="ends after so much text (default: 10 MB)",
    )
    transcript.add_argument(
        "--sessions", type=_count, default=100, metavar="N", help="ends with one more (default: %(default)s)"
    )
    transcript.add_argument("--out", type=Path, metavar="FILE", help="write it there, readable by you alone")
    _json(transcript)


def _user(commands: Commands) -> None:
    verbs = _verbs(commands, "user", "who may log in (SMTP AUTH): the credentials file")
    for name, help_text in (
        ("add", "add a user; asks for the password"),
        ("passwd", "change the password of a user"),
        ("list", "list the users and the senders they may use"),
        ("remove", "remove a user"),
        ("show", "show a user, its guard rails and what it has used of its quotas"),
        ("set", "set senders, priority and guard rails: KEY=VALUE, or KEY= for none"),
        ("default", "show or set the guard rails of users that have none of their own: KEY=VALUE"),
        ("disable", "refuse the log-ins and the mail of a user"),
        ("enable", "end that"),
        ("rotate", "add a second password, valid beside the old one; --finish ends the old one"),
    ):
        verb = _command(verbs, name, help_text)
        verb.add_argument(
            "--file", type=Path, metavar="FILE", help="credentials file; without it what [auth] names"
        )
        if name == "list":
            _json(verb)
            continue
        if name != "default":
            verb.add_argument("name", metavar="NAME", help="user name; case-sensitive")
        if name == "add":
            verb.add_argument(
                "--sender",
                action="append",
                default=[],
                metavar="PATTERN",
                help="sender that the user may use, several times if need be: user@example.com, example.com, "
                "*.example.com, bounce-*@example.com. Without it any",
            )
            verb.add_argument(
                "--priority",
                default="",
                choices=[each.value for each in Priority],
                help="of the user's mail; without it the listener's",
            )
        if name == "show":
            _json(verb)
        if name in ("set", "default"):
            verb.add_argument(
                "assignment",
                nargs="+" if name == "set" else "*",
                metavar="KEY=VALUE",
                help="such as recipients=example.com,*.example.com or messages_per_hour=500; "
                "docs/users.md has all keys",
            )
        if name == "rotate":
            verb.add_argument("--finish", action="store_true", help="end the old password")
        if name in ("add", "passwd", "rotate"):
            source = verb.add_mutually_exclusive_group()
            source.add_argument("--password-stdin", action="store_true", help="read it from standard input")
            source.add_argument("--generate", action="store_true", help="make a random one and print it once")


def _token(commands: Commands) -> None:
    verbs = _verbs(commands, "token", "who may use the HTTP API and the page: bearer tokens")
    add = _command(verbs, "add", "make a token and print it, once")
    add.add_argument("name", type=_token_name, metavar="NAME", help="whose it is, for the log")
    add.add_argument(
        "--scope",
        choices=SCOPES,
        required=True,
        help="read: look; operate: look, change the queue, read bodies; submit: hand in mail",
    )
    add.add_argument("--user", default="", metavar="NAME", help="user of the credentials file it acts as")
    add.add_argument(
        "--for", dest="lifetime", type=_age, metavar="AGE", help="it expires after that, e.g. 90d; else never"
    )
    listing = _command(verbs, "list", "list the tokens: names, scopes, times; never the tokens themselves")
    _json(listing)
    remove = _command(verbs, "remove", "remove a token: the next request with it is refused")
    remove.add_argument("name", type=_token_name, metavar="NAME")


def _certificates(commands: Commands) -> None:
    verbs = _verbs(commands, "cert", "certificates for listeners")
    signed = _command(verbs, "self-signed", "make a key and a certificate for a first start")
    signed.add_argument(
        "--name",
        action="append",
        metavar="NAME",
        help="name or address that clients connect to; may be repeated (default: the relay's hostname)",
    )
    signed.add_argument(
        "--out", type=Path, metavar="DIR", help="directory for NAME.pem and NAME.key (default: this one)"
    )
    signed.add_argument("--certificate", type=Path, metavar="FILE", help="instead of --out, with --key")
    signed.add_argument("--key", type=Path, metavar="FILE", help="instead of --out, with --certificate")
    signed.add_argument(
        "--days",
        type=_number(1, MAX_DAYS, " of days"),
        default=DEFAULT_DAYS,
        metavar="N",
        help="days until it expires (default: %(default)s)",
    )
    signed.add_argument("--force", action="store_true", help="replace files that exist")
    _json(signed)


def _dkim(commands: Commands) -> None:
    verbs = _verbs(commands, "dkim", "keys that sign mail")
    new = verbs.add_parser(
        "new",
        help="make a key; print its DNS record and its lines for the configuration",
        description="Make a key; print its DNS record and its lines for the configuration.",
        allow_abbrev=False,
    )
    new.add_argument("--domain", required=True, metavar="DOMAIN", help="domain that signs, as in From")
    new.add_argument(
        "--selector",
        required=True,
        metavar="NAME",
        help='name of the key, such as "s2026"; a new one each time',
    )
    new.add_argument(
        "--algorithm", choices=("rsa", "ed25519"), default="rsa", help="rsa has 2048 bits (default)"
    )
    new.add_argument("--out", type=Path, required=True, metavar="FILE", help="file for the private key")
    _json(new)
    _json(_command(verbs, "check", "compare every key with its record in DNS"))


def _outbox(commands: Commands) -> None:
    verbs = _verbs(commands, "outbox", "mail that applications insert into a table")
    _json(_command(verbs, "status", "how many rows there are of each status, as the database says"))
    _command(verbs, "schema", "print the SQL that makes the tables, and the rights that roles need")
    encrypt = _command(verbs, "encrypt-password", "encrypt the password of a mailbox; asks for it")
    encrypt.add_argument("--host", required=True, help="smtp_host of the mailbox")
    encrypt.add_argument("--port", type=_count, default=587, help="its smtp_port (default: %(default)s)")
    encrypt.add_argument("--user", required=True, metavar="NAME", help="its smtp_username")


def _webhook(commands: Commands) -> None:
    verbs = _verbs(commands, "webhook", "endpoints that are told what becomes of mail")
    _json(_command(verbs, "list", "each webhook: whether it takes events, and how many wait"))
    test = _command(verbs, "test", "post an event webhook.test now, and print the answer")
    replay = _command(verbs, "replay", "try now what waits, also where the endpoint wanted no more events")
    replay.add_argument(
        "--since", type=_age, metavar="AGE", help="tell once more what the history has of that time, e.g. 2h"
    )
    for verb in (test, replay):
        verb.add_argument("name", metavar="NAME", help="of the [[webhook]]")
        _json(verb)


def _spool(commands: Commands) -> None:
    verbs = _verbs(commands, "spool", "the spool itself")
    acknowledge = _command(verbs, "acknowledge", "a loss of the spool has been dealt with: tell it no more")
    acknowledge.add_argument("loss", metavar="ID", help="as `zonerelay status` shows it")
    _json(acknowledge)
    check = _command(verbs, "check", "read everything in the spool and say what is damaged")
    check.add_argument(
        "--tmp", type=Path, metavar="DIR", help="where its copy is made, beside the spool if not named"
    )
    _json(check)
    repair = _command(verbs, "repair", "make a sound spool of a damaged one; the relay is stopped")
    repair.add_argument("--yes", action="store_true", help="do it, and do not only say it")
    repair.add_argument("--dry-run", action="store_true", help="say what would be done; the default")
    repair.add_argument(
        "--salvage",
        type=Path,
        metavar="DIR",
        help="for what cannot be put back (default: beside the spool)",
    )
    _json(repair)
    _command(
        verbs, "is-empty", "of a stopped relay: print the directories of its spool, if that holds no mail"
    )
    _command(verbs, "accept-empty", "believe a shared store that lost the queue which this machine knows")
    backup = _command(verbs, "backup", "copy the queue and what belongs to it, beside a running relay")
    backup.add_argument("path", type=Path, metavar="DIR", help="what does not exist yet")
    _json(backup)
    restore = _command(verbs, "restore", "take a backup into the empty spool of a stopped relay")
    restore.add_argument("path", type=Path, metavar="DIR", help="what `spool backup` has written")
    moving = _command(verbs, "migrate", "move the whole queue to where another configuration keeps its own")
    moving.add_argument(
        "--to", type=Path, required=True, metavar="OTHER.toml", help="the configuration of the other relay"
    )
    moving.add_argument(
        "--drop-keys",
        action="store_true",
        help="go on although the other engine cannot take idempotency keys",
    )
    _json(moving)
    export = _command(verbs, "export", "write mail of a stopped relay to files; it stays in the spool")
    export.add_argument("path", type=Path, metavar="DIR|FILE.tar", help="what does not exist yet")
    _filters(export)
    _json(export)
    taking = _command(verbs, "import", "take mail into the spool of a stopped relay")
    taking.add_argument(
        "place",
        metavar="SOURCE",
        help="DIR or FILE.tar that `spool export` has written; with --from its queue",
    )
    taking.add_argument("--from", dest="system", choices=SYSTEMS, help="another system, which is stopped too")
    _json(taking)


def given(arguments: argparse.Namespace, request: type[R], **more: object) -> R:
    """A request with the options that are named as its fields, as far as they are given, and with `more`."""
    found = {name: getattr(arguments, name, None) for name in request.__struct_fields__}
    return request(**{**{name: value for name, value in found.items() if value is not None}, **more})


def filter_of(arguments: argparse.Namespace, message_id: str | None = None) -> Filter:
    """The filter options as the control protocol has them."""
    from zonerelay.operations.requests import Filter

    return given(arguments, Filter, message_id=message_id)


def _token_name(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", text) and text != "token_file":
        return text
    raise argparse.ArgumentTypeError("a name has letters, digits and . _ @ -, 64 at most")


def _smtp_address(text: str) -> str:
    try:
        address = parse_listen(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if address.is_unix:
        raise argparse.ArgumentTypeError("mail is released over TCP, as to 127.0.0.1:25")
    return text


def _age(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _at(text: str) -> float:
    """A time to come: a span from now, a time of day, or an ISO 8601 time, local without an offset."""
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
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write {_AT_HELP}") from error
    if at.timestamp() <= now.timestamp():
        raise argparse.ArgumentTypeError(f"{text!r} has passed")
    return at.timestamp()


def _size(text: str) -> int:
    try:
        return int(text) if text.isascii() and text.isdigit() else parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _ip(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not an IP address") from error


def _fingerprint(text: str) -> str:
    digits = text.replace(":", "").lower()
    if len(digits) != 64 or not set(digits) <= set("0123456789abcdef"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a SHA-256 fingerprint: 64 hexadecimal digits")
    return digits


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not (colon and name.strip() and text.isprintable()):
        raise argparse.ArgumentTypeError(f'{text!r} is not a header field: write "Name: value"')
    return name.strip(), value.strip()


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rows")
    return int(text)


def _number(least: int, most: int, of: str = "") -> Callable[[str], int]:
    def number(text: str) -> int:
        if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number{of} from {least} to {most}")
        return int(text)

    return number


def _worker(text: str) -> int:
    from zonerelay.config.settings import MAX_WORKERS

    return _number(0, MAX_WORKERS - 1)(text)


def _message_id(text: str) -> str:
    if not is_message_id(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a message id: it has 16 hexadecimal digits, as `zonerelay queue list` shows"
        )
    return text


def _one_line(text: str) -> str:
    if not text.isprintable() or len(text) > 400:
        raise argparse.ArgumentTypeError("a reason is one printable line of at most 400 characters")
    return text
