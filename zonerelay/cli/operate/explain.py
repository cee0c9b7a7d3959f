"""`explain ADDRESS`: queries the running relay, or evaluates the configuration if no relay runs."""

import asyncio
import time
from argparse import Namespace
from collections.abc import Iterator

from rich.text import Text

from zonerelay.cli.arguments import request_of
from zonerelay.cli.operate.queue import delivery_facts, order_line
from zonerelay.cli.relay import connect, load_settings
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import FAILED, OK, USAGE, CliError
from zonerelay.config.endpoints import CAPTURE
from zonerelay.operations.answers import ChangePlan, Explanation, HostPlan, StsPlan
from zonerelay.operations.errors import NotRunningError
from zonerelay.operations.requests import Explain, QueueExplain

_TLS = {
    "none": "never",
    "opportunistic": "if the host offers STARTTLS; otherwise clear text",
    "required": "always; mail is deferred if the host does not offer TLS",
    "verify": "always, with a valid certificate for the host's name; otherwise mail is deferred",
    "dane": "always, with a certificate that matches the TLSA records; otherwise mail is deferred",
}

_BECAUSE = {"destination": "the [[destination]]", "mta-sts": "the domain's MTA-STS policy"}

MAX_ROUTES = 20  # number of evaluated routes in the table


def explain(arguments: Namespace) -> int:
    """Print the route of mail for an address or a queued message. Return status 1 if the mail would not be
    deliverable, for use in scripts.
    """
    if not arguments.address and not arguments.message_id:
        raise CliError("which mail? Specify the address of a recipient, or a queued message with --id", USAGE)
    request = request_of(arguments, QueueExplain if arguments.message_id else Explain)
    from zonerelay.cli.operate.log import left_queue

    try:
        with left_queue(arguments.config, arguments.message_id):
            answers, _ = connect(arguments).all(request, Explanation)
    except NotRunningError:
        if not isinstance(request, Explain):
            raise
        # Imported here, because a query of a running relay needs none of the parts that deliver mail.
        from zonerelay.cli.operate.offline import explanation

        answers = [asyncio.run(explanation(load_settings(arguments.config), request))]
    console = output.console()
    for number, found in enumerate(answers):
        if arguments.json:
            (output.print_document if isinstance(request, Explain) else output.print_line)(found)
            continue
        if number:
            console.print()
        console.print(output.facts(_facts(found, time.time())))
        if not found.relay_running:
            output.tell("\nNo relay is running. This answer uses only the configuration.")
    return FAILED if any(found.unroutable for found in answers) else OK


def _facts(found: Explanation, now: float) -> Iterator[tuple[str, output.Fact]]:
    yield "address", found.address
    yield "from", found.sender
    for each in found.rewritten:
        what = each.problem if each.problem else f"becomes {each.becomes}"
        yield f"as {each.what}", f"{what} ({each.by})"
    yield "guard rails", Text(found.guard_rails, style="yellow")
    if found.queued is not None:
        yield "message", found.queued.message_id
        yield from delivery_facts(found.queued, now)
    else:
        rule = f"[[route]] number {found.rule}" if found.rule else "no [[route]]"
        yield "zone", f"{found.zone} ({rule}: {found.reason})"
        if found.priority not in ("", "normal"):
            yield "priority", found.priority
    yield from _route_facts(found)
    kept = " it is captured instead of being sent ([capture])" if found.next_hop == CAPTURE else ""
    yield "next hop", f"{found.next_hop}{kept}" if found.next_hop else f"MX of {found.route}"
    if found.unroutable:
        yield "result", Text(f"{found.verdict}: {found.unroutable}", style="red")
    for host in found.hosts:
        yield from _host_facts(host)
    yield from _source_facts(found, now)
    yield "log-in", found.credential
    if found.suspended_until is not None:
        left = text.until(found.suspended_until, now)
        yield "suspended", Text(f"next try {left}: {found.suspended_reply}", style="yellow")
    for order in found.orders:
        yield "order", order_line(order, now)
    yield from _change_facts(found.changes)
    if kept:
        return
    yield from _terms_facts(found)
    yield "EHLO name", found.ehlo_name
    limits: dict[str, int | str] = {**found.limits, **found.rates}
    if (largest := limits.get("max_message_size")) is not None:
        limits["max_message_size"] = text.size(int(largest))
    yield "limits", tuple(f"{name} = {value}" for name, value in limits.items())


def _terms_facts(found: Explanation) -> Iterator[tuple[str, output.Fact]]:
    """Yield the TLS requirement for the delivery, and its origin unless that is the zone."""
    if found.destination:
        yield "destination", f"{found.destination} of the configuration (counted from 0)"
    yield "tls", f"{found.tls}: {_TLS.get(found.tls, '')}"
    demand = found.tls_demand
    if demand is not None:
        for label, accepted in (("names", demand.names), ("certificates", demand.certificates)):
            if accepted:
                yield "", f"accepted instead: {label} {', '.join(accepted)}"
        if demand.because != "zone":
            yield "", f"because of {_BECAUSE.get(demand.because, demand.because)}"
        if demand.dane:
            yield "", "certificates of hosts with TLSA records must match them (DANE)"
    if found.mta_sts is not None:
        yield "mta-sts", _policy(found.mta_sts)


def _change_facts(plan: ChangePlan | None) -> Iterator[tuple[str, output.Fact]]:
    """Yield the changes that the zone makes to mail before sending, and its DKIM signatures."""
    if plan is None:
        return
    if plan.sender:
        yield "sent as", f"{plan.sender} (SRS)"
    yield from (("removes", plan.removed), ("replaces", plan.replaced), ("adds", plan.added))
    of = f"for {plan.author}" if plan.author else ""
    if of and plan.author_assumed:
        of += ", if this is the domain in From"
    for signature in plan.signed_by:
        yield "signs", f"{signature} {of}"
    if plan.unsigned:
        waits = Text(f"{plan.unsigned}: the mail would be deferred", style="yellow")
        yield "signs", waits if plan.must_sign else f"not: {plan.unsigned}"


def _policy(policy: StsPlan) -> output.Fact:
    if policy.mode:
        until = text.when(policy.expires) if policy.expires is not None else "?"
        names = ", ".join(policy.mx) or "no hosts"
        return f"{policy.mode}, policy {policy.policy} until {until}: {names}"
    if policy.problem:
        return Text(f"none: {policy.problem}", style="yellow")
    return "the domain has no policy"


def _source_facts(found: Explanation, now: float) -> Iterator[tuple[str, output.Fact]]:
    """Yield the zone's source addresses with the share of each, and why some are not used."""
    certain = any(each.chosen for each in found.sources)
    for each in found.sources:
        turn = ("this one" if each.chosen else "not this one") if certain else f"{each.share:.0%} of the mail"
        yield f"source {each.name}", f"{', '.join(each.addresses)} as {each.ehlo_name}: {turn}"
        if each.refused_until is not None:
            what = "its IPv6 address was refused" if each.refused_ipv6_only else "refused"
            over = text.until(each.refused_until, now)
            line = f"{what} by this destination; used again {over}. Reply: {each.refused_reply}"
            yield "", Text(line, style="yellow")
        if each.absent:
            yield "", Text(f"not an address of this machine: {', '.join(each.absent)}", style="yellow")


def _route_facts(found: Explanation) -> Iterator[tuple[str, output.Fact]]:
    """Yield why each `[[route]]` matches or does not match; if there are many, only the last ones."""
    left_out = max(len(found.routes) - MAX_ROUTES, 0)
    if left_out:
        yield "routes", f"{left_out:,} more that do not match (--json lists all)"
    for check in found.routes[left_out:]:
        if check.matches:
            yield f"route {check.rule}", f"yes, {found.reason}"
        else:
            yield f"route {check.rule}", f"no, {', '.join(check.unmatched)} (to {check.zone})"


def _host_facts(host: HostPlan) -> Iterator[tuple[str, output.Fact]]:
    yield "host", f"{host.name} port {host.port}, preference {host.preference}"
    yield "", Text(host.problem, style="yellow")
    if host.tlsa:
        yield "", f"its certificate must match a TLSA record (DANE): {', '.join(host.tlsa)}"
    for each in host.addresses:
        if each.problem:
            yield "", Text(f"{each.address}: {each.problem}", style="yellow")
        else:
            yield "", f"{each.address} from {each.source}"
        for line in each.learned:
            yield "", f"{each.address}: {line}"
