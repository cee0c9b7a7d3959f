"""Which zones the recipients of a message went to, and why, in a few lines for `queue trace`.

One line for each zone and reason, those for most recipients first, with the recipients when there is more
than one line. Bounded: a message has as many recipients as its client likes, and the notes stay with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from zonerelay.routing.zones.zones import Choice

MAX_NOTES = 20
MAX_NAMED = 5  # recipients in one note
MAX_NOTE = 500  # characters


def zone_notes(choices: Iterable[tuple[str, Choice]]) -> tuple[str, ...]:
    """None where there was nothing to choose."""
    chosen: dict[Choice, list[str]] = {}
    for recipient, choice in choices:
        if choice.why:
            chosen.setdefault(choice, []).append(recipient)
    if len(chosen) == 1:
        (choice,) = chosen
        return (_note(choice, ()),)
    most_first = sorted(chosen.items(), key=lambda item: -len(item[1]))
    notes = [_note(choice, recipients) for choice, recipients in most_first[:MAX_NOTES]]
    left = sum(len(recipients) for _, recipients in most_first[MAX_NOTES:])
    if left:
        notes.append(f"{left} more recipients, by other routes")
    return tuple(notes)


def _note(choice: Choice, recipients: Iterable[str]) -> str:
    names = list(recipients)
    whom = f": {', '.join(names[:MAX_NAMED])}" if names else ""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    text = f"zone={choice.zone} {choice.why}{whom}"
    room = MAX_NOTE - len(more)
    return (text if len(text) <= room else f"{text[: room - 1]}…") + more
