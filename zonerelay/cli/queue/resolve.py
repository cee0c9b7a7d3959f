"""`resolve PSEUDONYM`: whom the log means, as long as the queue still holds their mail."""

from __future__ import annotations

from argparse import Namespace

from zonerelay.cli.relay import connect
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import FAILED
from zonerelay.cli.terminal.progress_bar import Patience
from zonerelay.control.messages.answers import Address, End
from zonerelay.control.messages.requests import Resolve


def resolve(arguments: Namespace) -> int:
    found: list[Address] = []
    end = End()
    with Patience("Looking through the queue") as patience:
        for frame in connect(arguments.config).stream(Resolve(pseudonym=arguments.pseudonym)):
            patience.saw(frame)
            if isinstance(frame, Address):
                found.append(frame)
            elif isinstance(frame, End):
                end = frame
    if arguments.json:
        for address in found:
            output.print_line(address)
    elif found:
        rows = [(text.clean(each.address), each.role, each.message_id) for each in found]
        output.console().print(output.table(["address", "role", "message"], rows))
    if not found:
        output.chatter().print(
            "No mail in the queue has this pseudonym: it was delivered since, or the key has changed."
        )
    return output.completeness(end) if found else FAILED
