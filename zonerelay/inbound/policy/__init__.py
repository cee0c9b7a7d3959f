"""Asks an operator's own code at the steps of a session. Policies import from here: docs/policy.md."""

from zonerelay.inbound.policy.api import (
    Answer,
    Auth,
    ClientInfo,
    Connect,
    Decision,
    EndOfData,
    Event,
    Headers,
    Helo,
    Mail,
    Policy,
    PolicyContext,
    Rcpt,
    accept,
    refuse,
)

__all__ = [
    "Answer",
    "Auth",
    "ClientInfo",
    "Connect",
    "Decision",
    "EndOfData",
    "Event",
    "Headers",
    "Helo",
    "Mail",
    "Policy",
    "PolicyContext",
    "Rcpt",
    "accept",
    "refuse",
]
