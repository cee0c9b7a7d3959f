"""Checks whether mail could be sent to a sender's domain (`check_sender_domain`).

A sender is refused for good only for what the domain's own DNS settles: it takes no mail (null MX, RFC 7505
4.2), it does not exist, it has neither MX nor address, or it is not a domain. A name server that fails or is
silent costs a 451, and so does any unexpected error. The null sender and address literals name no domain:
they pass.

Nothing is remembered here: the resolver caches, within bounds, and joins equal questions.
"""

from __future__ import annotations

import asyncio
import logging

from zonerelay.model.reply import Reply
from zonerelay.routing.dns.answers import DnsStatus
from zonerelay.routing.dns.resolver import Resolver
from zonerelay.routing.idna import ascii_domain, is_literal

NULL_MX = Reply(550, "7.27", "Sender address has null MX")
NO_DOMAIN = Reply(550, "1.8", "Sender's domain does not exist")
NO_HOST = Reply(550, "1.8", "Sender's domain has no mail host")
UNKNOWN = Reply(451, "4.3", "Sender's domain cannot be looked up now")

_log = logging.getLogger(__name__)


class SenderDomains:
    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver

    async def check(self, domain: str) -> Reply | None:
        """The refusal, if there is one. Raises only CancelledError."""
        if not domain or is_literal(domain):
            return None
        try:
            name = ascii_domain(domain)
        except ValueError:
            return NO_DOMAIN
        try:
            return await self._check(name)
        except Exception:  # noqa: BLE001 - unknown trouble is temporary (rule 3)
            _log.exception("unexpected error while looking up a sender's domain")
            return UNKNOWN

    async def _check(self, name: str) -> Reply | None:
        answer = await self._resolver.mx(name)
        match answer.status:
            case DnsStatus.OK:
                return NULL_MX if all(not record.host for record in answer.records) else None
            case DnsStatus.NODATA | DnsStatus.NXDOMAIN:
                return await self._by_address(name, answer.status)
            case DnsStatus.SERVFAIL | DnsStatus.TIMEOUT | DnsStatus.NO_TCP | DnsStatus.BAD:
                return UNKNOWN

    async def _by_address(self, name: str, denial: DnsStatus) -> Reply | None:
        """Check the domain's own address, which takes its mail without any MX record (RFC 5321 5.1).

        `denial` is the answer to the question for its MX. Only when the questions for addresses have the same
        answer is it true: some name servers deny every type that they do not know.
        """
        answers = await asyncio.gather(self._resolver.lookup(name, "A"), self._resolver.lookup(name, "AAAA"))
        if any(answer.records for answer in answers):
            return None
        # The hosts file counts for a name that DNS knows.
        if denial is DnsStatus.NODATA and (await self._resolver.addresses(name, ipv6=True)).ips:
            return None
        if any(answer.status is not denial for answer in answers):
            return UNKNOWN
        return NO_DOMAIN if denial is DnsStatus.NXDOMAIN else NO_HOST
