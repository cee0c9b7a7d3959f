"""Converts an operator's request to the equivalent command line. No I/O."""

import shlex

from zonerelay.config.units import format_duration
from zonerelay.operations.catalogue import operation_of
from zonerelay.operations.operation import Unit, fields_of
from zonerelay.operations.requests import Request


def command_of(request: Request, *words: str, now: float = 0.0) -> str:
    """Return the `zonerelay` command line that is equivalent to this request. `words` are those that no field
    of the request has; ages are counted from `now`.
    """
    operation = operation_of(request)
    values, options = list[str](), list[str]()
    for each in fields_of(type(request)):
        value = getattr(getattr(request, each.within) if each.within else request, each.name)
        name = f"{each.within}.{each.name}" if each.within else each.name
        flag = (operation.flags or {}).get(name, each.option.flag)
        if value == each.default or not (flag or each.option.positional):
            continue
        if each.option.unit is Unit.DURATION:
            value = format_duration(value)
        elif each.option.unit is Unit.AGO:
            value = format_duration(round(now - value))
        if each.option.positional:
            values += value if isinstance(value, tuple) else [value]
        elif value is True:
            options.append(flag)
        else:
            options += [f"{flag}={value}"] if value.startswith("-") else [flag, value]
    return shlex.join(["zonerelay", *operation.command.split(), *values, *options, *words])
