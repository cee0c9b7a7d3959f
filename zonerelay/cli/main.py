"""The `zonerelay` command: parses, runs one command, and turns every end into an exit status.

Commands are imported when they run: `zonerelay queue list` must answer at once, and `zonerelay serve`
must not carry table printing into a daemon.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib import import_module

from zonerelay import __version__
from zonerelay.cli import arguments as grammar
from zonerelay.cli.terminal.exits import BROKEN_PIPE, FAILED, INTERRUPTED, OK, CliError
from zonerelay.operations.errors import ControlError

STANDARD_ERROR = 2

COMMANDS = {
    "acts": ("operate.acts", "acts"),
    "undo": ("operate.acts", "undo"),
    "status": ("operate.status", "status"),
    "config": ("setup.config", "show"),
    "explain": ("operate.explain", "explain"),
    "report": ("operate.log", "report"),
    "resolve": ("operate.read", "resolve"),
    "tail": ("operate.tail", "tail"),
    "transcript": ("operate.tail", "transcript"),
    "queue": ("operate.change", "change"),
    "queue cat": ("spool.body", "cat"),
    "queue list": ("operate.read", "list_deliveries"),
    "queue show": ("operate.read", "show"),
    "queue summary": ("operate.read", "summary"),
    "queue trace": ("operate.read", "trace"),
    "suspend": ("operate.orders", "suspend"),
    "resume": ("operate.orders", "resume"),
    "log find": ("operate.log", "find"),
    "log forget": ("operate.log", "forget_address"),
    "log show": ("operate.log", "show"),
    "outbox": ("operate.outbox", "outbox"),
    "spool acknowledge": ("spool.state", "acknowledge"),
    "spool accept-empty": ("spool.state", "accept_empty"),
    "spool backup": ("spool.backup", "backup"),
    "spool check": ("spool.check", "check"),
    "spool export": ("spool.exchange", "export_to"),
    "spool import": ("spool.exchange", "import_from"),
    "spool is-empty": ("spool.state", "is_empty"),
    "spool migrate": ("spool.migrate", "migrate"),
    "spool repair": ("spool.repair", "repair"),
    "spool restore": ("spool.backup", "restore"),
    "webhook list": ("operate.webhook", "list_webhooks"),
    "webhook replay": ("operate.webhook", "replay"),
    "webhook test": ("operate.webhook", "test"),
    "init": ("setup.init", "init"),
    "token": ("setup.token", "token"),
    "user": ("setup.user", "user"),
    "cert": ("setup.certificates", "self_signed"),
    "dkim": ("setup.dkim", "dkim"),
}
"""The module and the function of each command, or of one of its verbs. The function is given the parsed
arguments and returns the exit status.
"""


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["sendmail"]:
        from zonerelay.sendmail import main as sendmail

        return sendmail(words[1:])
    arguments = grammar.parse(argv)
    try:
        status = _run(arguments)
        sys.stdout.flush()
    except (CliError, ControlError) as error:
        if str(error):
            from zonerelay.cli.terminal.text import clean_lines

            print(f"zonerelay: {clean_lines(str(error))}", file=sys.stderr)
        return error.status if isinstance(error, CliError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has what it wants. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return status


def _run(arguments: Namespace) -> int:
    match arguments.command:
        case "serve" | "worker":
            return _run_relay(arguments)
        case "check-config":
            from zonerelay.cli.relay import config_path
            from zonerelay.cli.setup.check_config import run

            return run(config_path(arguments.config))
        case "sandbox":
            from zonerelay.sandbox.run import main as sandbox

            return sandbox(arguments.release_to or "")
        case "version":
            print(f"zonerelay {__version__}")
            return OK
    verb = f"{arguments.command} {getattr(arguments, 'verb', '')}"
    module, function = COMMANDS.get(verb) or COMMANDS[arguments.command]
    return int(getattr(import_module(f"zonerelay.cli.{module}"), function)(arguments))


def _keep_standard_streams() -> None:
    """Open those that are closed (`2>&-`): libuv aborts where a socket has the number of one."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STANDARD_ERROR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, number in (("stdout", STANDARD_ERROR - 1), ("stderr", STANDARD_ERROR)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115 - as long as the process


def _run_relay(arguments: Namespace) -> int:
    from zonerelay.cli.relay import config_path
    from zonerelay.serve import run_worker, serve

    _keep_standard_streams()
    config = config_path(arguments.config)
    if arguments.command == "serve":
        return serve(config)
    return run_worker(config, arguments.index, drains_spool=arguments.drains_spool)
