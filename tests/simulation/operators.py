"""What operators do in a run: suspensions, holds and their undo, retries, bounces, drops.

They speak to the handler that the control socket speaks to, and repeat what has failed.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any

from tests.simulation.ledger import Suspension
from tests.simulation.parts import Node
from zonerelay.control.runner import ResponseStream
from zonerelay.operations import requests
from zonerelay.operations.catalogue import OperationCall

if TYPE_CHECKING:
    from tests.simulation.scenario import Run


class Dice(Random):
    """What chance has for one event. `number` is its seed."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Operator(ResponseStream):
    """An operator who reads everything."""

    def __init__(self) -> None:
        super().__init__(OperationCall(request=requests.Ping(), caller="operator"))
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
        return random.choice(
            (
                *[(requests.Selectors(domain=domain), f"*@{domain}", False)] * 2,
                (requests.Selectors(sender=some.sender), some.sender, True),
                (requests.Selectors(recipient=recipient), recipient, False),
                (requests.Selectors(zone="default"), "*", False),
                (requests.Selectors(everything=True), "*", False),
            )
        )

    async def do_suspend(self, node: Node, seconds: float, dice: Dice) -> None:
        about, pattern, by_sender = self._about(dice)
        ends, stops = seconds if dice.random() < 0.3 else None, dice.random() < 0.3
        effect: Any = dice.choice(("suspend", "suspend", "hold"))
        request = requests.Suspend(
            about=about, reason="simulated", seconds=ends, stop_clock=stops, effect=effect
        )
        given = [await self.ask(each, request) for each in self._nodes]
        suspension = Suspension(pattern, self._run.loop.now, by_sender)
        # A hold lets mail pass that was released, and an order with an end goes by a clock that may be set.
        if effect == "suspend" and ends is None and all(each and each.new for each in given):
            self._run.ledger.suspensions.append(suspension)
        await asyncio.sleep(seconds)
        for each in self._run.ledger.suspensions:
            if each.about == pattern and each.ended is None:
                each.ended = self._run.loop.now
        # The order of another operator about the same mail had its id first: that one ends, too.
        if all([await self.insist(each, requests.Resume(about=about)) for each in self._nodes]):
            self.over |= {each.order.id for each in given if each is not None}

    async def do_hold(self, node: Node, seconds: float, dice: Dice) -> None:
        answer = await self._change(node, dice, requests.Hold)
        if answer is None:
            return
        await asyncio.sleep(seconds)
        # An undo may be refused when its journal is older than the process; then all is released.
        undo = requests.Undo(undoes=answer.act)
        if not (answer.act and dice.number % 2 and await self.insist(node, undo, times=3)):
            await self.insist(node, requests.Release(everything=True))

    async def do_retry(self, node: Node, seconds: float, dice: Dice) -> None:
        """Now, or at a time."""
        at = node.process.now() + seconds if node.process is not None and dice.number % 2 else None
        answer = await self._change(node, dice, requests.Retry, at=at)
        if answer is not None and answer.act and dice.number % 4 == 1:
            await asyncio.sleep(seconds / 2)
            await self.ask(node, requests.Undo(undoes=answer.act))

    async def do_drop(self, node: Node, seconds: float, dice: Dice) -> None:
        """What is in the bin for a day would be left in the spool at the end of a run."""
        await self._change(node, dice, requests.Drop, purge=True)

    async def do_bounce(self, node: Node, seconds: float, dice: Dice) -> None:
        await self._change(node, dice, requests.Bounce)

    async def _change(self, node: Node, dice: Dice, action: type[requests.QueueChange], **more: Any) -> Any:
        domain = self._run.some_submission(dice).recipients[0].partition("@")[2]
        chosen = requests.Filter(recipient=f"*@{domain}")
        return await self.ask(node, action(filter=chosen, reason="simulated", **more))
