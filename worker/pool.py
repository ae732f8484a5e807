"""The jails of one worker, and the slots in which they run calls.

There is one jail for each kind of preload, and every slot can use any of them, so a burst of sympy never finds
its place taken by idle numpy. A keeper task for each kind starts its jail, and another when it broke or has served
its time: a worn jail goes on until its last call has ended, while the new one takes the next. Calls with a loopback
device, and calls with a hash seed, have jails of their own, a family of all kinds, which the first such call starts.

A call waits for a jail that holds what it imports, if one is on its way: an import in the program itself would be
charged to it. Where none will start it gets a lighter one, and imports for itself.
"""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

from sandbox.calls import Network, ToolCall, ToolResult
from sandbox.errors import JailError
from sandbox.jail import PRELOADS, Host, Jail, Slots, choose, prepare
from sandbox.jail.selftest import check_walls
from sandbox.settings import JailSettings

log = logging.getLogger("worker.pool")

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0  # between attempts to start a jail that will not
NO_JAIL_S = 60.0  # a call that finds no jail of any kind for so long has met a fault of ours


class Family(NamedTuple):
    """What a call's jail must be, beside warm: the jails of a family differ in their preload only."""

    network: Network = "none"
    hash_seed: int | None = None


class JailPool:
    """Runs calls, one in each slot. The caller never asks for more at a time than there are slots."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._slots = Slots(host)
        self._jails: dict[Family, list[Jail | None]] = {}
        self._keepers: dict[Family, list[asyncio.Task[None]]] = {}
        self._failing: set[tuple[Family, int]] = set()  # kinds whose last start failed
        self._retiring: dict[asyncio.Task[None], Jail] = {}
        self._changed = asyncio.Event()
        self._is_closed = False

    @classmethod
    async def open(cls, settings: JailSettings, slots: int) -> JailPool:
        """Start the lightest jail and try its walls; the others warm up while that one serves.

        Raises ConfigError or JailError when the host cannot give the level, or a wall is missing.
        """
        pool = cls(prepare(settings, slots))
        try:
            first = await Jail.start(pool.host, PRELOADS[0])
            try:
                await check_walls(first, pool._slots.free[0])
            except BaseException:
                await first.close()
                raise
        except BaseException:
            pool._slots.close()
            raise
        pool._keep_all(Family(), first)
        return pool

    async def run(self, call: ToolCall, jail: Jail | None = None) -> ToolResult:
        """Run a call in the jail that `jail_for` gave for it, or would give.

        A call whose jail broke under it is run once more in another: whatever it did is gone with its jail. Raises
        JailError when that breaks too.
        """
        slot = self._slots.free.pop()
        try:
            try:
                return await (jail or await self.jail_for(call)).run(call, slot)
            except JailError as exc:
                log.warning("a jail failed", extra={"call": call.id, "error": exc.message})
                return await (await self.jail_for(call)).run(call, slot)
        finally:
            self._slots.free.append(slot)

    async def jail_for(self, call: ToolCall) -> Jail:
        """The lightest jail that holds what the code imports, when it is there; where none starts, the heaviest.

        Raises JailError when there is none at all for NO_JAIL_S.
        """
        family, wanted = Family(call.network, call.hash_seed), choose(call.code)
        self._keep_all(family)
        try:
            async with asyncio.timeout(NO_JAIL_S):
                while (jail := self._best(family, wanted)) is None and not self._is_closed:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as exc:
            raise JailError(f"no jail has started for {NO_JAIL_S:.0f} s") from exc
        if jail is None:
            raise JailError("the worker ends its jails")
        return jail

    def _best(self, family: Family, wanted: int) -> Jail | None:
        """None: wait."""
        if self._is_closed:
            return None
        serving = [jail if jail and not jail.is_broken else None for jail in self._jails[family]]
        if (jail := next(filter(None, serving[wanted:]), None)) is not None:
            return jail
        if any((family, kind) not in self._failing for kind in range(wanted, len(PRELOADS))):
            return None
        return next(filter(None, reversed(serving[:wanted])), None)

    def _keep_all(self, family: Family, first: Jail | None = None) -> None:
        """See to it that there are jails of this family from now on; the lightest may be there already."""
        if family not in self._keepers and not self._is_closed:
            self._jails[family] = [first, *[None] * (len(PRELOADS) - 1)]
            self._keepers[family] = [
                asyncio.create_task(self._keep(family, kind)) for kind in range(len(PRELOADS))
            ]

    async def _keep(self, family: Family, kind: int) -> None:
        """See to it that there is a jail of one kind, until cancelled."""
        wait_s = FIRST_WAIT_S
        jails = self._jails[family]
        while True:
            jail = jails[kind]
            if jail is not None:
                await jail.worn.wait()
            try:
                new = await Jail.start(self.host, PRELOADS[kind], *family)
            except JailError as exc:
                log.warning(
                    "a jail does not start", extra={"preload": PRELOADS[kind].name, "error": exc.message}
                )
                self._failing.add((family, kind))
                self._changed.set()
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
                continue
            wait_s = FIRST_WAIT_S
            jails[kind] = new
            self._failing.discard((family, kind))
            self._changed.set()
            if jail is not None:
                retiring = asyncio.create_task(jail.retire())
                self._retiring[retiring] = jail
                retiring.add_done_callback(self._retired)

    def _retired(self, retiring: asyncio.Task[None]) -> None:
        del self._retiring[retiring]
        self._changed.set()

    async def renew(self) -> None:
        """Have every jail replaced, as if it had served its time, and wait until the last of the old ones is gone."""
        kept = list(self._jails.values())
        old = [jail for jails in kept for jail in jails if jail is not None]
        for jail in old:
            jail.worn.set()
        while self._retiring or any(jail is None or jail in old for jails in kept for jail in jails):
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        """End every jail. A call that still runs raises JailError."""
        self._is_closed = True
        self._changed.set()
        keepers = [keeper for keepers in self._keepers.values() for keeper in keepers]
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        jails = [jail for jails in self._jails.values() for jail in jails if jail is not None]
        jails += self._retiring.values()
        await asyncio.gather(*(jail.close() for jail in jails), *self._retiring)
        self._slots.close()
