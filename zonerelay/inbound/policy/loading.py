"""Imports the class that `policy = "module:Class"` names and makes an object of it."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from types import ModuleType

from zonerelay.inbound.policy.api import EVENTS, Policy, PolicyContext


def load_policy(name: str, context: PolicyContext) -> Policy:
    """Import and run the operator's code, without a time limit: at a start or a reload.

    Raises ValueError with a text for the operator.
    """
    module_name, _, class_name = name.partition(":")
    if not (module_name and class_name):
        raise ValueError(f'write it as "module:Class", not {name!r}')
    policy_class = _class(_module(module_name), class_name)
    if not any(getattr(policy_class, e.step) is not getattr(Policy, e.step) for e in EVENTS):
        steps = ", ".join(event.step for event in EVENTS)
        raise ValueError(f"{name} has no method of an event, so nothing would ever be asked: {steps}")
    try:
        return policy_class(context)
    except ValueError as error:
        # Said in words for the operator, as the base class asks for.
        raise ValueError(f"{name} cannot be used: {error}") from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name} cannot be used: {type(error).__name__}: {error}") from error


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing and (name == missing or name.startswith(f"{missing}.")):
            file = f"{missing.partition('.')[0]}.py"
            raise ValueError(
                f"there is no module {missing!r}: name the directory that holds {file} in PYTHONPATH "
                f"(systemd: Environment=PYTHONPATH=…), or install it into {sys.prefix}"
            ) from error
        raise ValueError(f"cannot import {name!r}: it needs {missing!r}, which is not installed") from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"cannot import {name!r}: {type(error).__name__}: {error}") from error


def _class(module: ModuleType, name: str) -> type[Policy]:
    found: object = getattr(module, name, None)
    if found is None:
        raise ValueError(f"module {module.__name__!r} has no {name!r}{_instead(module, name)}")
    if inspect.isclass(found) and issubclass(found, Policy):
        return found
    wrong = (
        "does not derive from zonerelay.inbound.policy.Policy" if inspect.isclass(found) else "is no class"
    )
    raise ValueError(f"{module.__name__}:{name} {wrong}{_instead(module, name)}")


def _instead(module: ModuleType, name: str) -> str:
    policies = [
        each
        for each, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Policy) and value is not Policy
    ]
    close = difflib.get_close_matches(name, policies, 1) or policies[:1]
    return f"; did you mean {close[0]!r}?" if close else ""
