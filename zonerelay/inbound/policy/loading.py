"""Imports the objects that the options `policy` and `authenticator` of a listener name, and creates
instances.

A policy is a class derived from `Policy`, or an aiosmtpd handler with methods such as handle_DATA: either a
class whose constructor needs no arguments, or an object. aiosmtpd is imported only if it is needed. Every
failure is a ValueError with a message for the operator.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from zonerelay.inbound.policy.api import EVENTS, Policy, PolicyContext, PresentedLogin
from zonerelay.process.operator_code import named

_HOOK = re.compile(r"handle_[A-Z]+|process_message")

Made = TypeVar("Made")


def load_policy(name: str, context: PolicyContext) -> Policy:
    """Import the operator's code and create the policy. There is no time limit, because this is at start or
    reload.

    Raise ValueError with a message for the operator on failure.
    """
    found = named(name, "module:Class", _instead)
    if not (inspect.isclass(found) and issubclass(found, Policy)):
        return _made(name, lambda: _handler_policy(name, found, context))
    if not any(getattr(found, e.step) is not getattr(Policy, e.step) for e in EVENTS):
        steps = ", ".join(event.step for event in EVENTS)
        raise ValueError(f"{name} has no method for an event and would never be called; methods are {steps}")
    return _made(name, lambda: found(context))


def load_authenticator(name: str, context: PolicyContext) -> Callable[[PresentedLogin], object]:
    """Import the operator's code, and return the step that calls it. Raise ValueError as `load_policy`
    does.
    """
    found = named(name, "module:Class", _instead)
    check: Any = _made(name, found) if inspect.isclass(found) else found  # Any: an operator's object
    expected = (
        "a callable with (server, session, envelope, mechanism, auth_data), as authenticators of aiosmtpd"
    )
    try:
        inspect.signature(check).bind(None, None, None, "PLAIN", None)
    except TypeError as error:
        raise ValueError(f"{name} is not {expected}: {error}") from error
    from zonerelay.inbound.policy.aiosmtpd_handler import authenticator_step  # noqa: PLC0415

    return authenticator_step(check, context.hostname)


def _handler_policy(name: str, found: object, context: PolicyContext) -> Policy:
    if not any(_HOOK.fullmatch(each) for each in dir(found)):
        what = "class" if inspect.isclass(found) else "object"
        raise _WrongKindError(
            f"{name} is neither a subclass of zonerelay.inbound.policy.Policy nor an aiosmtpd handler: "
            f"this {what} has no method such as handle_DATA{_instead(name)}"
        )
    if context.file is not None:
        raise ValueError("policy_file is not passed to an aiosmtpd handler; remove it")
    # Imported here, so that aiosmtpd uses no memory unless there is a handler.
    from zonerelay.inbound.policy.aiosmtpd_handler import HandlerPolicy  # noqa: PLC0415

    return HandlerPolicy(_object(found), context)


def _object(found: object) -> object:
    if not inspect.isclass(found):
        return found
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        remedy = "create the object in a module of your own, and name the object instead of the class"
        raise ValueError(f"{error}; {remedy}") from error
    made: object = found()
    return made


class _WrongKindError(ValueError):
    """The object is not a policy or handler. The text is a complete message."""


def _made(name: str, make: Callable[[], Made]) -> Made:
    try:
        return make()
    except _WrongKindError:
        raise
    except ValueError as error:
        # The text is a message for the operator, as the base class requires.
        raise ValueError(f"{name} cannot be used: {error}") from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name} cannot be used: {type(error).__name__}: {error}") from error


def _instead(wrong: str) -> str:
    module_name, _, name = wrong.partition(":")
    policies = [
        each
        for each, value in vars(sys.modules[module_name]).items()
        if inspect.isclass(value)
        and value is not Policy
        and (issubclass(value, Policy) or any(_HOOK.fullmatch(method) for method in dir(value)))
    ]
    import difflib  # noqa: PLC0415 - only with a mistake

    close = difflib.get_close_matches(name, policies, 1) or policies[:1]
    return f"; did you mean {close[0]!r}?" if close else ""
