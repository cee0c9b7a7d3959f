"""An operator's own code in the SMTP session: the interface for writing a policy, and the code that runs it.

These names are the public interface of docs/send/policy.md and do not change. `api` declares them, `loading`
imports the operator's class, and `runner` calls it in dedicated threads, within a time limit. Code written
for aiosmtpd is called the same way: `aiosmtpd_handler` turns its hooks into steps, and `Changes` are its
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
