"""An operator's own policy in the SMTP session: the interface for writing it, and the code that runs it.

These names are the public interface of docs/send/policy.md and do not change. `api` declares them; `runner`
imports the operator's class, and calls it in dedicated threads, within a time limit. Code written
for aiosmtpd is called the same way: `aiosmtpd_handler` turns its hooks into steps, and `Changes` are its
decisions.
"""

from zonerelay.inbound.policy.api import *
