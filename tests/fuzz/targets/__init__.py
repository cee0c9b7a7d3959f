"""What is fuzzed: functions of bytes that raise AssertionError when a promise is broken.

Whatever else a target raises is a finding too: each catches only what the code under test says it raises.
"""

from collections.abc import Callable, Mapping

from tests.fuzz.targets import (
    bodies,
    chunks,
    commands,
    configuration,
    front,
    logins,
    messages,
    names,
    replies,
    sessions,
    tls,
)

Target = Callable[[bytes], None]

TARGETS: Mapping[str, Target] = {
    "lines": commands.lines,
    "commands": commands.commands,
    "paths": commands.paths,
    "body": bodies.body,
    "bdat": chunks.bdat,
    "stuffing": bodies.stuffing,
    "replies": replies.replies,
    "ehlo": replies.ehlo,
    "addresses": messages.addresses,
    "headers": messages.headers,
    "dsn": messages.dsn,
    "edits": messages.edits,
    "config": configuration.toml,
    "credentials": logins.credentials,
    "sasl": logins.sasl,
    "proxy": front.proxy,
    "xclient": front.xclient,
    "tls": tls.tls,
    "dns": names.answers,
    "session": sessions.session,
}
