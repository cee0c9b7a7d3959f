"""A configuration in which every option is given, in the order of the reference."""

from zonerelay.config.toml_text import options

GIVEN = {
    "access.client": '["192.0.2.0/24"]',
    "route.recipient_domain": '["example.com"]',
    "source.name": '"one"',
    "source.address": '["192.0.2.7"]',
    "credential.name": '"account"',
    "credential.user": '"user"',
    "credential.password": '"/etc/zonerelay/smarthost.password"',
    "dkim.domain": '"example.com"',
    "dkim.selector": '"s2026"',
    "dkim.key_file": '"/etc/zonerelay/dkim.key"',
    "rewrite.address": '["old.example"]',
    "rewrite.to": '"@example.com"',
    "webhook.url": '"https://app.example.com/mail-events"',
    "webhook.secret": '"/etc/zonerelay/hook.secret"',
}
"""What has no default that is a use of the table."""


def every_option() -> str:
    lines, table = [], ""
    for option in options():
        if option.table != table:
            table = option.table
            lines += ["", option.heading]
        lines.append(f"{option.key} = {GIVEN.get(f'{table}.{option.key}', option.default)}")
    return "\n".join(lines) + "\n"
