"""An operator's own code in the session: what a policy is written with, and what runs it.

These names are the public interface of docs/send/policy.md and stay as they are. `api` declares them,
`loading` imports the operator's class, `runner` asks it in threads of its own, within a time limit. Code
written for aiosmtpd is asked the same way: `aiosmtpd_handler` makes steps of its hooks, `changes` are its
decisions.
"""

from zonerelay.inbound.policy.api import ACCEPT as ACCEPT
from zonerelay.inbound.policy.api import EVENTS as EVENTS
from zonerelay.inbound.policy.api import Auth as Auth
from zonerelay.inbound.policy.api import ClientInfo as ClientInfo
from zonerelay.inbound.policy.api import Connect as Connect
from zonerelay.inbound.policy.api import Decision as Decision
from zonerelay.inbound.policy.api import EndOfData as EndOfData
from zonerelay.inbound.policy.api import Event as Event
from zonerelay.inbound.policy.api import Headers as Headers
from zonerelay.inbound.policy.api import Helo as Helo
from zonerelay.inbound.policy.api import Mail as Mail
from zonerelay.inbound.policy.api import Policy as Policy
from zonerelay.inbound.policy.api import PolicyContext as PolicyContext
from zonerelay.inbound.policy.api import Rcpt as Rcpt
from zonerelay.inbound.policy.api import accept as accept
from zonerelay.inbound.policy.api import refuse as refuse

__all__ = [
    "ACCEPT", "EVENTS", "Auth", "ClientInfo", "Connect", "Decision", "EndOfData", "Event", "Headers",
    "Helo", "Mail", "Policy", "PolicyContext", "Rcpt", "accept", "refuse",
]  # fmt: skip
