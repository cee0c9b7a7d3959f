"""Writes the TOML that tests and the bench need: tables, arrays of tables and plain values."""

import json
from collections.abc import Mapping, Sequence

Value = str | int | float | bool | Sequence[str]
Table = Mapping[str, Value]


def toml_value(value: Value) -> str:
    """JSON's spelling of these types is TOML's."""
    return json.dumps(value if isinstance(value, (str, int, float)) else list(value), ensure_ascii=False)


def toml_document(top: Table, tables: Mapping[str, Table | Sequence[Table]]) -> str:
    """Top-level keys, then `[name]` for a mapping and `[[name]]` for each item of a sequence."""
    lines = _keys(top)
    for name, content in tables.items():
        if isinstance(content, Mapping):
            lines += ["", f"[{name}]", *_keys(content)]
        else:
            for item in content:
                lines += ["", f"[[{name}]]", *_keys(item)]
    return "\n".join(lines) + "\n"


def _keys(table: Table) -> list[str]:
    return [f"{key} = {toml_value(value)}" for key, value in table.items()]
