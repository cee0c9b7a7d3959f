"""Errors of the control channel. Every text can be printed as it is."""

from __future__ import annotations


class ControlError(Exception):
    """The control channel, or what was asked through it, does not work; the text says what to do."""


class NotRunningError(ControlError):
    """No relay answers at the socket."""


class AnotherRelayError(ControlError):
    """Another relay answers where this one would listen."""


class NotFoundError(ControlError):
    """The message or other thing that the request names does not exist, or no longer exists."""
