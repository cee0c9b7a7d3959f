"""Renders the templates of the operators' page. Only this module imports Jinja, and it is loaded for the
first page.

All external values pass through `shown`: autoescape makes their markup harmless, `printable` makes control
characters, escape sequences and bidirectional controls visible, and `<bdi>` isolates their writing direction.
Static files are named after their content, so browsers can cache them forever.
"""

import hashlib
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from zonerelay.admin.page import filter_text
from zonerelay.config.units import exact_span, rough_size, span, until, when
from zonerelay.telemetry.logs.redact import printable

HOME = Path(__file__).parent
TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

MENU = (
    ("/", "Overview"),
    ("/destinations", "Destinations"),
    ("/queue", "Queue"),
    ("/history", "History"),
    ("/suspensions", "Suspensions and changes"),
    ("/tail", "Live tail"),
    ("/configuration", "Configuration"),
)
CAPTURED = (("/captured", "Captured mail"),)
"""Additional menu items if mail is captured."""


class PageRenderer:
    """Renders the templates of the page."""

    def __init__(self) -> None:
        self.assets: dict[str, tuple[bytes, str]] = {}
        """The content and type of each file, by its name with the hash of the content."""
        self._names: dict[str, str] = {}
        for path in sorted((HOME / "static").iterdir()):
            if kind := TYPES.get(path.suffix):
                content = path.read_bytes()
                stem = path.name.removesuffix(path.suffix)
                name = f"{stem}.{hashlib.sha256(content).hexdigest()[:12]}{path.suffix}"
                self.assets[name], self._names[path.name] = (content, kind), name
        self._templates = Environment(
            loader=FileSystemLoader(HOME / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            auto_reload=False,
        )
        self._templates.filters.update(_FILTERS)
        self._templates.globals.update(
            menu=MENU,
            captured_menu=CAPTURED,
            filter_term=filter_text.term,
            asset=lambda name: f"/static/{self._names[name]}",
        )

    def render(self, template: str, values: Mapping[str, object]) -> str:
        return self._templates.get_template(template).render(values)


def _shown(text: object) -> Markup:
    return Markup("<bdi>{}</bdi>").format(printable(str(text)))


def _lines(text: str) -> str:
    """Return a multi-line text without unprintable characters. The template's `pre` element isolates it."""
    return "\n".join(map(printable, text.replace("\t", "    ").splitlines()))


def _path(sender: str | None) -> Markup:
    """Format an envelope sender, with `<>` for the null sender, and `?` if the message could not be read."""
    return _shown("?" if sender is None else sender or "<>")


def _sampled(count: int, every: int) -> str:
    """Format a count, which may be an estimate from a sample. If only a sample was counted, a zero is shown
    as less than the sampling interval.
    """
    if count or every == 1:
        return f"{count:,}"
    return f"<{every}" if every else "?"


_FILTERS: dict[str, Callable[..., object]] = {
    "shown": _shown,
    "plain": lambda text: printable(str(text)),
    "lines": _lines,
    "path": _path,
    "span": span,
    "exact_span": exact_span,
    "until": until,
    "when": when,
    "iso": lambda then: datetime.fromtimestamp(then).astimezone().isoformat(timespec="milliseconds"),
    "size": rough_size,
    "number": lambda count: f"{count:,}",
    "amount": lambda count, quota: rough_size(count) if quota.startswith("octets") else f"{count:,}",
    "sampled": _sampled,
    "digit": lambda text: text if text in ("2", "4", "5") else "0",
    "kind": lambda event: event.partition(" ")[0] if event.replace(" ", "").isalpha() else "",
}
