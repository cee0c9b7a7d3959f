"""Renders the mustache templates of a batch of messages with the substitutions of each message.

Values are texts, numbers, true, false and null, but no lists and objects, so a section is a condition and the
size of the result is bounded. Partials, which are files, and other delimiters are not supported. A name
without a value is an error, even in a section that is omitted, because a message with a gap is worse than
none. Values that are not texts are written as JSON, and null as nothing. Values are escaped in HTML only.

The cost is limited before anything is filled in: `MAX_TAGS` names in all templates of a message, and
`MAX_OUTPUT` characters in the largest possible result.
"""

import html
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from pystache import Renderer
from pystache.common import TemplateNotFoundError
from pystache.context import KeyNotFoundError
from pystache.parser import ParsingError

from zonerelay.admin.problems import pointer_to, wrong
from zonerelay.admin.submission.body import LONG, JsonBody
from zonerelay.admin.submission.drafts import as_text

MAX_OUTPUT = 1024 * 1024
MAX_TAGS = 1000
_TEXTS = ("subject", "text", "html")
_WHOLE_TAG = re.compile(r"\{{3}[^{}]{0,300}+\}{3}|(?<!\{)\{{2}[^{}]{0,300}+\}{2}")
_BLANKS = re.compile(r"[ \t]{300}")
"""The library's time grows with the cube of such runs, and it holds the interpreter's lock all the time."""
_TAG = re.compile(r"\{\{\s*(?:[#^&{]\s*)?([^\s{}!/>=#^&][^{}]*?)\s*\}\}")


class _TemplateRenderer(Renderer):
    """Renders the mustache templates of a batch of messages."""

    def str_coerce(self, val: str | float | None) -> str:
        return as_text(val)


def substituted(fields: Mapping[str, Any], body: JsonBody) -> dict[str, Any]:
    """Return the fields of a message with all templates rendered. Raise ApiError if a template or a value is
    invalid.
    """
    found = dict(fields)
    values = found.pop("substitutions", None)
    if values is None:
        return found
    if not isinstance(values, dict):
        raise wrong("/substitutions", "substitutions must be an object")
    for name, value in values.items():
        if not isinstance(value, str | int | float | bool | None):
            raise wrong(
                pointer_to("substitutions", name), "a value must be a string, a number, true, false or null"
            )
    if body.refers(msgspec.json.encode(values)):
        raise wrong("/substitutions", f"a value exceeds {LONG} bytes")
    longest = max((len(as_text(each)) for each in values.values()), default=0)
    places: list[tuple[str, dict[str, Any], str]] = [(f"/{name}", found, name) for name in _TEXTS]
    if isinstance(found.get("headers"), dict):
        headers = found["headers"] = dict(found["headers"])
        places += [(pointer_to("headers", name), headers, name) for name in headers]
    templates = [place for place in places if isinstance(place[1].get(place[2]), str)]
    tags = size = 0
    for pointer, within, name in templates:
        text = within[name]
        if body.long(text):
            raise wrong(pointer, f"a template exceeds {LONG} bytes")
        tags += text.count("{{")
        size += len(text)
        if "{{=" in text or tags > MAX_TAGS or (tags and size + tags * longest * 6 > MAX_OUTPUT):
            limit = f"at most {MAX_TAGS} template tags and {MAX_OUTPUT} characters of output are allowed"
            raise wrong(pointer, f"unsupported delimiters, or too large: {limit}")

    def filled(text: str, pointer: str) -> str:
        if "{{" in _WHOLE_TAG.sub(" ", text) or _BLANKS.search(text):
            raise wrong(
                pointer, "a name has no end or more than 300 characters, or there are 300 blanks in a row"
            )
        for name in _TAG.findall(text):
            if name not in values and name != ".":
                raise wrong(pointer, f"the substitutions do not contain {name}")
        escape = html.escape if pointer == "/html" else str
        renderer = _TemplateRenderer(escape=escape, missing_tags="strict", partials={})
        try:
            return renderer.render(text, values)
        except KeyNotFoundError as error:
            raise wrong(pointer, f"the substitutions do not contain {error.key}") from None
        except (ParsingError, TemplateNotFoundError, RecursionError) as error:
            raise wrong(pointer, f"the template cannot be rendered: {error}") from None

    for pointer, within, name in templates:
        if "{{" in within[name]:
            within[name] = filled(within[name], pointer)
    return found
