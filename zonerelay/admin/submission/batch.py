"""Fills the {{names}} of a template with the substitutions of one message (mustache, by pystache).

Values are texts, numbers, true, false and null, but no lists and objects, so a section is a condition and the
size of the result is bounded. Partials, which are files, and other delimiters are not supported. A name
without a value is an error, even in a section that is omitted, because a message with a gap is worse than
none. Values that are not texts are written as JSON, and null as nothing. Values are escaped in HTML only.

The cost is limited before anything is filled in: `MAX_TAGS` names in all templates of a message, and
`MAX_OUTPUT` characters in the largest possible result.
"""

import html
import re
from collections.abc import Iterator, Mapping
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
_TAG = re.compile(r"\{\{\s*(?:[#^&{]\s*)?([^\s{}!/>=#^&][^{}]*?)\s*\}\}")


class _TemplateRenderer(Renderer):
    """Renders the templates of one batch."""

    def str_coerce(self, val: str | float | None) -> str:
        return as_text(val)


def substituted(fields: Mapping[str, Any], body: JsonBody) -> dict[str, Any]:
    """Return the fields with all templates filled in. Raise Problem if a template or a value is invalid."""
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
    tags = size = 0
    for pointer, text in _templates(found):
        if body.long(text):
            raise wrong(pointer, f"a template exceeds {LONG} bytes")
        tags += text.count("{{")
        size += len(text)
        if "{{=" in text or tags > MAX_TAGS or (tags and size + tags * longest * 6 > MAX_OUTPUT):
            limit = f"the templates of a message exceed {MAX_TAGS} names or {MAX_OUTPUT} characters of output"
            raise wrong(pointer, f"unsupported delimiters, or {limit}")

    def filled(text: object, pointer: str, *, escapes: bool = False) -> object:
        if not isinstance(text, str) or "{{" not in text:
            return text
        for name in _TAG.findall(text):
            if name not in values and name != ".":
                raise wrong(pointer, f"there is no substitution for {name}")
        renderer = _TemplateRenderer(
            escape=html.escape if escapes else str, missing_tags="strict", partials={}
        )
        try:
            return renderer.render(text, values)
        except KeyNotFoundError as error:
            raise wrong(pointer, f"there is no substitution for {error.key}") from None
        except (ParsingError, TemplateNotFoundError, RecursionError) as error:
            raise wrong(pointer, f"the template cannot be rendered: {error}") from None

    for name in _TEXTS:
        if name in found:
            found[name] = filled(found[name], f"/{name}", escapes=name == "html")
    headers = found.get("headers")
    if isinstance(headers, dict):
        found["headers"] = {name: filled(text, pointer_to("headers", name)) for name, text in headers.items()}
    return found


def _templates(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each text that is a template, with a JSON pointer to it."""
    headers = fields.get("headers")
    named = [(f"/{name}", fields.get(name)) for name in _TEXTS]
    if isinstance(headers, dict):
        named += [(pointer_to("headers", name), text) for name, text in headers.items()]
    return ((pointer, text) for pointer, text in named if isinstance(text, str))
