"""Converts one TOML value to one setting, by the option's `Form`.

Each reader takes what tomllib made of the value and raises ValueError with a text that says what
was expected, with an example. Readers see one value only; checks of several are in `tables` and `checks.py`.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Callable
from pathlib import Path

from zonerelay.config.options import endpoints, forms, units
from zonerelay.config.options.options import AUTO, Form, Option
from zonerelay.config.options.wording import did_you_mean, in_words, quoted

_ZONE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_FUNCTION = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*")
_FINGERPRINT = re.compile(r"[0-9A-Fa-f]{64}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

MAX_TEXT = 1000


def read_value(value: object, option: Option) -> object:
    """The setting for a value of any form but a list of things."""
    return _READERS[option.form](value, option)


def item_form(form: Form) -> Form | None:
    """The form of a list's items; `None` when the form is not a list."""
    return _ITEMS.get(form)


def _switch(value: object, option: Option) -> bool:
    if not isinstance(value, bool):
        raise expected("true or false (no quotes)", value)
    return value


def _switch_or_auto(value: object, option: Option) -> bool | None:
    if value == "auto":
        return None
    if not isinstance(value, bool):
        raise expected('true, false (no quotes) or "auto"', value)
    return value


def _count(value: object, option: Option) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise expected(f"a whole number such as {max(100, int(option.least))}", value)
    return int(_bounded(value, option, str))


def _workers(value: object, option: Option) -> int:
    if value == "auto":
        return AUTO
    if isinstance(value, bool) or not isinstance(value, int):
        raise expected('a whole number such as 4, or "auto"', value)
    return int(_bounded(value, option, str))


def _ratio(value: object, option: Option) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise expected("a number such as 0.1", value)
    return _bounded(float(value), option, lambda number: f"{number:g}")


def _size(value: object, option: Option) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise expected(f"a size such as {units.SIZE_EXAMPLE}", value)
    return int(_bounded(units.parse_size(value), option, lambda octets: units.format_size(int(octets))))


def _duration(value: object, option: Option) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise expected(f"a duration such as {units.DURATION_EXAMPLE}", value)
    return _bounded(units.parse_duration(value), option, units.format_duration)


def _bounded(number: float, option: Option, show: Callable[[float], str]) -> float:
    if number == 0 and option.optional:
        return number
    # Written so that nan, which TOML can say, is refused too.
    if not option.least <= number <= option.most:
        zero = " (or 0 for none)" if option.optional and option.least else ""
        raise ValueError(
            f"must be from {show(option.least)} to {show(option.most)}{zero}, not {show(number)}"
        )
    return number


def _choice(value: object, option: Option) -> str:
    word = _text(value, option)
    if word not in option.choices:
        near = did_you_mean(word, option.choices)
        raise ValueError(f"must be {in_words(option.choices, 'or')}, not {quoted(word)}{near}")
    return word


def _text(value: object, option: Option) -> str:
    if not isinstance(value, str):
        raise expected("text in quotes", value)
    if not value and not option.optional:
        raise ValueError("must not be empty; leave the key out for its default")
    if len(value) > MAX_TEXT or _CONTROL.search(value):
        raise ValueError(f"expected a line of at most {MAX_TEXT} characters without control characters")
    return value


def _path(value: object, option: Option) -> Path | None:
    text = _text(value, option)
    if text.startswith("~"):
        raise ValueError(f"{quoted(text)}: ~ means a different place for every user; write the path in full")
    return Path(text) if text else None


def _zone_name(value: object, option: Option) -> str:
    text = _text(value, option)
    if not _ZONE_NAME.fullmatch(text):
        raise ValueError(
            f"{quoted(text)} is not a zone name: 1 to 64 letters, digits, dots, dashes and underscores"
        )
    return text


def _ehlo_name(value: object, option: Option) -> str:
    text = _text(value, option)
    if text and not endpoints.is_ehlo_name(text):
        raise ValueError(
            f"{quoted(text)} is not a host name: write it in full, as in "
            '"relay.example.org", or an address literal, "[192.0.2.1]"'
        )
    return text


def _listen(value: object, option: Option) -> str:
    text = _text(value, option)
    return str(endpoints.parse_listen(text)) if text else ""


def _name_server(value: object, option: Option) -> str:
    text = _text(value, option)
    endpoints.parse_name_server(text)
    return text


def _network(value: object, option: Option) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    text = _text(value, option)
    example = 'write it as "192.0.2.0/24", "192.0.2.7" or "2001:db8::/32"'
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"{quoted(text)} is not a network: {example}") from None
    if "/" in text and network.network_address != ipaddress.ip_address(text.partition("/")[0]):
        address = text.partition("/")[0]
        raise ValueError(
            f'{quoted(text)} names an address inside the network: write "{network}" or "{address}"'
        )
    if isinstance(network, ipaddress.IPv6Network) and network.network_address.ipv4_mapped is not None:
        raise ValueError(f"{quoted(text)} is IPv4 in IPv6 clothes: {example}")
    return network


def _function(value: object, option: Option) -> str:
    text = _text(value, option)
    if text and not _FUNCTION.fullmatch(text):
        raise ValueError(
            f"{quoted(text)} does not name a function or a class: "
            'write "module:name", as in "mypolicy:Mine" or "myretry:backoff"'
        )
    return text


def _fingerprint(value: object, option: Option) -> str:
    """64 hexadecimal digits in lower case."""
    text = _text(value, option)
    digits = text.lower().removeprefix("sha256 fingerprint=").removeprefix("sha256:").replace(":", "")
    if not _FINGERPRINT.fullmatch(digits):
        raise ValueError(
            f"{quoted(text)} is not a SHA-256 fingerprint: 64 hexadecimal digits, with or without colons, "
            "as openssl x509 -noout -fingerprint -sha256 -in client.pem prints them"
        )
    return digits


def _line(read: Callable[[str], object]) -> Callable[[object, Option], object]:
    """A reader of text that needs to know nothing else."""

    def read_line(value: object, option: Option) -> object:
        text = _text(value, option)
        return read(text) if text or not option.optional else text

    return read_line


def _rate(value: object, option: Option) -> units.Rate | None:
    return units.parse_rate(value) if value != "" else None


def _date(value: object, option: Option) -> float:
    return forms.date(value)


_READERS: dict[Form, Callable[[object, Option], object]] = {
    Form.SWITCH: _switch,
    Form.SWITCH_OR_AUTO: _switch_or_auto,
    Form.COUNT: _count,
    Form.WORKERS: _workers,
    Form.RATIO: _ratio,
    Form.SIZE: _size,
    Form.DURATION: _duration,
    Form.CHOICE: _choice,
    Form.TEXT: _text,
    Form.PATH: _path,
    Form.ZONE_NAME: _zone_name,
    Form.EHLO_NAME: _ehlo_name,
    Form.LISTEN: _listen,
    Form.NAME_SERVER: _name_server,
    Form.NETWORK: _network,
    Form.DOMAIN: _line(forms.domain),
    Form.HEADER: _line(forms.header),
    Form.FIELD_NAME: _line(forms.field_name),
    Form.REMOVED_FIELD: _line(forms.removed_field),
    Form.FUNCTION: _function,
    Form.FINGERPRINT: _fingerprint,
    Form.ADDRESS_PATTERN: _line(forms.address_pattern),
    Form.REPLY: _line(forms.reply),
    Form.RATE: _rate,
    Form.DATE: _date,
    Form.NEXT_HOPS: _line(forms.next_hops),
    Form.SOURCE_NAME: _line(forms.source_name),
    Form.IP_ADDRESS: _line(forms.ip_address),
    Form.SECRET: _line(forms.secret),
    Form.URL: _line(forms.url),
    Form.SELECTOR: _line(forms.selector),
    Form.REPLACEMENT: _line(forms.replacement),
    Form.NEW_FIELD: _line(forms.new_field),
    Form.PRIORITY: _line(forms.priority),
}

_ITEMS = {
    Form.DURATIONS: Form.DURATION,
    Form.TEXTS: Form.TEXT,
    Form.LISTENS: Form.LISTEN,
    Form.NAME_SERVERS: Form.NAME_SERVER,
    Form.NETWORKS: Form.NETWORK,
    Form.DOMAINS: Form.DOMAIN,
    Form.HEADERS: Form.HEADER,
    Form.PATHS: Form.PATH,
    Form.FINGERPRINTS: Form.FINGERPRINT,
    Form.ADDRESS_PATTERNS: Form.ADDRESS_PATTERN,
    Form.IP_ADDRESSES: Form.IP_ADDRESS,
    Form.SECRETS: Form.SECRET,
    Form.NEW_FIELDS: Form.NEW_FIELD,
    Form.REMOVED_FIELDS: Form.REMOVED_FIELD,
    Form.PRIORITIES: Form.PRIORITY,
}


_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a table",
    datetime.datetime: "a date",
    datetime.date: "a date",
    datetime.time: "a time",
}


def kind_of(value: object) -> str:
    """What TOML calls it, for a person."""
    return _KINDS[type(value)]


def expected(what: str, value: object, hint: str = "") -> ValueError:
    return ValueError(f"expected {what}, not {kind_of(value)}{hint}")
