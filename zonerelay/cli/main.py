"""The entry point of the `zonerelay` command: parses the arguments, runs one command and returns its exit
status.

Commands are imported when they run: `zonerelay queue list` must respond immediately, and `zonerelay serve`
must not load code for printing tables into a daemon.
"""

import errno
import gc
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib import import_module

from zonerelay import __version__
from zonerelay.cli.terminal.exits import BROKEN_PIPE, FAILED, INTERRUPTED, OK, USAGE, CliError, complain
from zonerelay.operations.errors import ControlError, InvalidError

STANDARD_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["sendmail"]:
        from zonerelay.sendmail import main as sendmail

        return sendmail(words[1:])
    _keep_standard_streams()
    # imports create few reference cycles, and collecting them takes a tenth of the start-up time
    gc.set_threshold(50_000)
    try:
        from zonerelay.cli.arguments import parse  # Ctrl-C during the start is not an error

        arguments = parse(words)
        module, _, function = arguments.run.partition(":")
        status = int(getattr(import_module(f"zonerelay.cli.{module}"), function)(arguments))
        sys.stdout.flush()
    except CliError as error:
        complain(str(error))
        return error.status
    except ControlError as error:
        complain(str(error))
        return USAGE if isinstance(error, InvalidError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe. Python would report the error again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        complain(f"{error.filename or 'the output'} cannot be written: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # as for the pipe
        status = FAILED
    return status


def serve(arguments: Namespace) -> int:
    from zonerelay import serve
    from zonerelay.cli.relay import config_path

    config = config_path(arguments.config)
    if arguments.command == "worker":
        return serve.run_worker(config, arguments.index, drains_spool=arguments.drains_spool)
    return serve.serve(config)


def sandbox(arguments: Namespace) -> int:
    from zonerelay.cli.operate.tail import EventLog
    from zonerelay.config.endpoints import parse_listen
    from zonerelay.sandbox.run import main as run_sandbox

    for option, address in (("--listen", arguments.listen), ("--page", arguments.page)):
        if address and not arguments.open and not parse_listen(address).is_loopback:
            what = (
                "is not a loopback address: other machines could send, read and delete mail. Allow it with "
                "--open"
            )
            raise CliError(f"{option} {address} {what}", USAGE)
    return run_sandbox(arguments, EventLog)


def version(_: Namespace) -> int:
    print(f"zonerelay {__version__}")
    return OK


def _keep_standard_streams() -> None:
    """Open the standard streams that are closed (`2>&-`), because libuv aborts if a socket gets one of their
    numbers.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STANDARD_ERROR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 - as long as the process
