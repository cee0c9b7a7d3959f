"""The `zonerelay` command: parses, runs one command, and turns every end into an exit status.

Commands are imported when they run: `zonerelay queue list` must answer at once, and `zonerelay serve`
must not carry table printing into a daemon.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence

from zonerelay import __version__
from zonerelay.cli import arguments as grammar
from zonerelay.cli.terminal.exits import BROKEN_PIPE, FAILED, INTERRUPTED, OK, CliError
from zonerelay.control.socket.errors import ControlError


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

            return sandbox()
        case "version":
            print(f"zonerelay {__version__}")
            return OK
        case "queue":
            return _run_queue(arguments)
    return _run_question(arguments)


def _run_relay(arguments: Namespace) -> int:
    from zonerelay.cli.relay import config_path
    from zonerelay.serve import run_worker, serve

    config = config_path(arguments.config)
    if arguments.command == "serve":
        return serve(config)
    return run_worker(config, arguments.index, drains_spool=arguments.drains_spool)


def _run_question(arguments: Namespace) -> int:
    match arguments.command:
        case "status":
            from zonerelay.cli.operate.status import status

            return status(arguments)
        case "explain":
            from zonerelay.cli.operate.explain import explain

            return explain(arguments)
        case "resolve":
            from zonerelay.cli.operate.read import resolve

            return resolve(arguments)
        case "user":
            from zonerelay.cli.setup.user import user

            return user(arguments)
        case "cert":
            from zonerelay.cli.setup.certificates import self_signed

            return self_signed(arguments)
    return _run_tool(arguments)


def _run_tool(arguments: Namespace) -> int:
    match arguments.command:
        case "outbox":
            from zonerelay.cli.operate.outbox import outbox

            return outbox(arguments)
        case "dkim":
            from zonerelay.cli.setup.dkim import dkim

            return dkim(arguments)
        case "init":
            from zonerelay.cli.setup.init import init

            return init(arguments)
        case "spool":
            return _run_spool(arguments)
    raise AssertionError(arguments.command)


def _run_spool(arguments: Namespace) -> int:
    match arguments.verb:
        case "export":
            from zonerelay.cli.spool.exchange import export_to

            return export_to(arguments)
        case "import":
            from zonerelay.cli.spool.exchange import import_from

            return import_from(arguments)
        case "check":
            from zonerelay.cli.spool.check import check

            return check(arguments)
        case "repair":
            from zonerelay.cli.spool.repair import repair

            return repair(arguments)
        case "is-empty":
            from zonerelay.cli.spool.drained import is_empty

            return is_empty(arguments)
    from zonerelay.cli.operate.spool import accept_empty, acknowledge

    return acknowledge(arguments) if arguments.verb == "acknowledge" else accept_empty(arguments)


def _run_queue(arguments: Namespace) -> int:
    match arguments.verb:
        case "list":
            from zonerelay.cli.operate.read import list_deliveries

            return list_deliveries(arguments)
        case "show":
            from zonerelay.cli.operate.read import show

            return show(arguments)
        case "trace":
            from zonerelay.cli.operate.read import trace

            return trace(arguments)
    from zonerelay.cli.operate.change import change

    return change(arguments)
