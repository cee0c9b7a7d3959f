"""What operators do in a run: suspensions, holds and their undo, retries, bounces, drops.

They speak to the handler that the control socket speaks to, and repeat what has failed.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any

from tests.simulation.ledger import Suspension
from tests.simulation.parts import Node
from zonerelay.control.runner import Answer
from zonerelay.operations import requests
from zonerelay.operations.catalogue import Call

if TYPE_CHECKING:
    from tests.simulation.scenario import Run


class _Operator(Answer):
    """An operator who reads everything."""

    def __init__(self) -> None:
        super().__init__(Call(request=requests.Ping(), caller="operator"))
        self.frames: list[Any] = []

    async def send(self, frame: Any) -> None:
        self.frames.append(frame)


class Operators:
    def __init__(self, run: Run) -> None:
        self._run, self._nodes = run, run.nodes
        self.over: set[str] = set()
        """The suspensions that have ended on every node: they hold nothing any more."""

    async def ask(self, node: Node, request: requests.Request) -> Any:
        """Return the last frame of the answer; `None` if there is none."""
        answer = _Operator()
        if not node.is_up or node.process is None:
            return None
        try:
            await asyncio.wait_for(node.process.finish(node.handler.handle(request, answer)), 30.0)
        except Exception as error:
            self._run.sometimes[f"operator got {type(error).__name__}"] += 1
            return None
        return answer.frames[-1]

    async def insist(self, node: Node, request: requests.Request, times: int = 60) -> bool:
        for _ in range(times):
            if await self.ask(node, request) is not None:
                return True
            await asyncio.sleep(2.0)
        return False

    async def release_everything(self) -> None:
        """What was held on a node that died may be on another one since, where nobody has released it."""
        for node in self._nodes:
            if not await self.insist(node, requests.Release(everything=True), times=4):
                self._run.failures.append(f"{node.name} gave operators no answer when the faults were over")

    def _about(self, random: Random) -> tuple[requests.Selectors, str, bool]:
        """Return some mail that is there, as a selector and as a pattern, and whether that is of senders."""
        some = self._run.some_submission(random)
        recipient = some.recipients[0]
        domain = recipient.partition("@")[2]
        match random.choice(("domain", "domain", "sender", "recipient", "zone", "everything")):
            case "sender":
                return requests.Selectors(sender=some.sender), some.sender, True
            case "recipient":
                return requests.Selectors(recipient=recipient), recipient, False
            case "zone":
                return requests.Selectors(zone="default"), "*", False
            case "everything":
                return requests.Selectors(everything=True), "*", False
            case _:
                return requests.Selectors(domain=domain), f"*@{domain}", False

    async def do_suspend(self, index: int, seconds: float, seed: int) -> None:
        random = Random(seed)
        about, pattern, by_sender = self._about(random)
        ends = seconds if random.random() < 0.3 else None
        request = requests.Suspend(
            about=about,
            reason="simulated",
            seconds=ends,
            stop_clock=random.random() < 0.3,
            effect=random.choice(("suspend", "suspend", "hold")),
        )
        given = [await self.ask(node, request) for node in self._nodes]
        suspension = Suspension(pattern, self._run.loop.now, by_sender)
        # A hold lets mail pass that was released, and an order with an end goes by a clock that may be set.
        if request.effect == "suspend" and ends is None and all(each and each.new for each in given):
            self._run.ledger.suspensions.append(suspension)
        await asyncio.sleep(seconds)
        for each in self._run.ledger.suspensions:
            if each.about == pattern and each.ended is None:
                each.ended = self._run.loop.now
        # The order of another operator about the same mail had its id first: that one ends, too.
        if all([await self.insist(node, requests.Resume(about=about)) for node in self._nodes]):
            self.over |= {each.order.id for each in given if each is not None}

    async def do_hold(self, index: int, seconds: float, seed: int) -> None:
        answer = await self._change(index, seed, requests.Hold)
        if answer is None:
            return
        await asyncio.sleep(seconds)
        undo: requests.Request = requests.Undo(undoes=answer.act)
        everything = requests.Release(everything=True)
        for attempt in range(60):
            # An undo may be refused when its journal is older than the process; then all is released.
            request = undo if answer.act and attempt < 3 and seed % 2 else everything
            if await self.ask(self._nodes[index], request) is not None:
                break
            await asyncio.sleep(2.0)

    async def do_retry(self, index: int, seconds: float, seed: int) -> None:
        """Now, or at a time."""
        process = self._nodes[index].process
        at = process.now() + seconds if process is not None and seed % 2 else None
        answer = await self._change(index, seed, requests.Retry, at=at)
        if answer is not None and answer.act and seed % 4 == 1:
            await asyncio.sleep(seconds / 2)
            await self.ask(self._nodes[index], requests.Undo(undoes=answer.act))

    async def do_drop(self, index: int, seconds: float, seed: int) -> None:
        """What is in the bin for a day would be left in the spool at the end of a run."""
        await self._change(index, seed, requests.Drop, purge=True)

    async def do_bounce(self, index: int, seconds: float, seed: int) -> None:
        await self._change(index, seed, requests.Bounce)

    async def _change(self, index: int, seed: int, action: type[requests.QueueChange], **more: Any) -> Any:
        domain = self._run.some_submission(Random(seed)).recipients[0].partition("@")[2]
        chosen = requests.Filter(recipient=f"*@{domain}")
        return await self.ask(self._nodes[index], action(filter=chosen, reason="simulated", **more))
