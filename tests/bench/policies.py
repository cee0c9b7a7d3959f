"""A policy that does nothing."""

from zonerelay.inbound.policy import Decision, Mail, Policy, Rcpt


class Nothing(Policy):
    """Asked in a thread of several."""

    def mail(self, event: Mail) -> Decision | None:
        return None

    def rcpt(self, event: Rcpt) -> Decision | None:
        return None
