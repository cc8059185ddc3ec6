"""Faults at random, by a seed: what is struck, for how long, and how it heals."""

import asyncio
import contextlib
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable

import asyncpg

from .actor import LEASE_MS
from .cluster import Cluster, ClusterError, send
from .history import History
from .processes import Processes
from .proxy import Side
from .proxy_process import ProxyProcess

LOCKED_ROWS = 50
_LOCK = f"""
select 1 from flowfabric.execution where lifecycle_phase <> 'terminal'
 order by random() limit {LOCKED_ROWS} for update skip locked;
select 1 from flowfabric.claim order by random() limit {LOCKED_ROWS} for update skip locked
"""
_DIRECT_FAULTS = (ClusterError, OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)

KILL, STOP, CUT, SILENCE, DROP, REFUSE = "kill -9", "stop past the lease", "cut", "silence", "drop the answer", "refuse"
FAST, IMMEDIATE, FAILOVER = "restart, fast", "restart, immediate", "failover to the standby"
LOCKS, READ_ONLY, FULL_DISK = "lock rows", "read-only moment", "full disk"
WEIGHTS = {
    **{KILL: 5, STOP: 4, CUT: 5, SILENCE: 4, DROP: 6, REFUSE: 2, LOCKS: 3, READ_ONLY: 2},
    **{FAST: 1, IMMEDIATE: 1, FAILOVER: 2, FULL_DISK: 1},
}
"""How often a fault is chosen, beside the others."""


class Injector:
    """Strikes until it is told to heal."""

    def __init__(
        self, cluster: Cluster, proxy: ProxyProcess, processes: Processes, history: History, chance: random.Random
    ) -> None:
        self.struck: Counter[str] = Counter()
        self._cluster = cluster
        self._proxy = proxy
        self._processes = processes
        self._history = history
        self._chance = chance
        self._tasks: set[asyncio.Task[None]] = set()
        self._strikes: dict[str, Callable[[], Awaitable[None]]] = {
            KILL: self._kill,
            STOP: self._stop,
            CUT: self._cut,
            SILENCE: self._silence,
            DROP: self._drop,
            REFUSE: self._refuse,
            FAST: lambda: self._cluster.restart("fast"),
            IMMEDIATE: lambda: self._cluster.restart("immediate"),
            LOCKS: self._lock,
            READ_ONLY: self._read_only,
        }
        self.left_out: dict[str, str] = {}
        """The faults that cannot be brought about here, and why."""
        if cluster.standby is not None:
            self._strikes[FAILOVER] = self._failover
        else:
            self.left_out[FAILOVER] = "this run has no standby"
        if cluster.has_small_disk:
            self._strikes[FULL_DISK] = self._fill_disk
        else:
            self.left_out[FULL_DISK] = "the data is not on a disk of its own: that takes root and a tmpfs"

    async def strike(self, seconds: float) -> None:
        """Bring about one fault after the other for so long."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        # Every kind once, in random order, before chance alone decides.
        first = list(self._strikes)
        self._chance.shuffle(first)
        while loop.time() < until:
            name = first.pop() if first else self._chosen()
            self._history.tell("fault", name=name)
            self.struck[name] += 1
            try:
                await self._strikes[name]()
            except _DIRECT_FAULTS as error:
                # One fault may be in the way of the next.
                self._history.tell("fault failed", name=name, detail=str(error))
                with contextlib.suppress(*_DIRECT_FAULTS):
                    await self._cluster.heal()
            await asyncio.sleep(self._chance.uniform(0.1, 0.8))

    async def heal(self) -> None:
        """Let everything work again; connections that fell silent for ever stay so."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._processes.resume()
        await self._cluster.heal()
        await self._proxy.do("lead", url=self._cluster.primary.url)
        await self._proxy.do("refuse", on=False)

    def _chosen(self) -> str:
        names = list(self._strikes)
        return self._chance.choices(names, [WEIGHTS[name] for name in names])[0]

    async def _kill(self) -> None:
        victim = self._chance.choice(self._processes.living())
        await self._processes.kill(victim)
        await asyncio.sleep(self._chance.uniform(0, 0.5))
        self._processes.start(victim)

    async def _stop(self) -> None:
        running = [name for name in self._processes.living() if name not in self._processes.stopped]
        if not running:
            return
        victim = self._chance.choice(running)
        process = self._processes.stop(victim)

        async def go_on(seconds: float) -> None:
            await asyncio.sleep(seconds)
            self._processes.stopped.discard(victim)
            send(process, signal.SIGCONT)

        self._later(go_on(LEASE_MS / 1000 * self._chance.uniform(1.1, 2)))

    async def _cut(self) -> None:
        await self._proxy.do("cut", share=self._chance.choice((0.2, 0.5, 1)))

    async def _silence(self) -> None:
        sides = self._chance.choice((list(Side), [Side.CLIENT], [Side.SERVER]))
        seconds = self._chance.choice((None, None, self._chance.uniform(0.5, 3)))
        await self._proxy.do("silence", share=self._chance.choice((0.2, 0.5, 1)), sides=sides, seconds=seconds)

    async def _drop(self) -> None:
        await self._proxy.do("drop", share=self._chance.choice((0.2, 0.5, 1)))

    async def _refuse(self) -> None:
        await self._proxy.do("refuse", on=True)
        await self._proxy.do("cut", share=0.5)
        await asyncio.sleep(self._chance.uniform(0.2, 1))
        await self._proxy.do("refuse", on=False)

    async def _failover(self) -> None:
        primary = await self._cluster.failover()
        await self._proxy.do("lead", url=primary.url)
        await self._cluster.rebuild()

    async def _lock(self) -> None:
        async def hold(seconds: float) -> None:
            with contextlib.suppress(*_DIRECT_FAULTS):
                connection = await self._cluster.connect()
                try:
                    await connection.execute(f"begin; {_LOCK}")
                    await asyncio.sleep(seconds)
                finally:
                    connection.terminate()

        self._later(hold(self._chance.uniform(1, 4)))

    async def _read_only(self) -> None:
        await self._cluster.read_only(on=True)
        await asyncio.sleep(self._chance.uniform(0.3, 1.5))
        await self._cluster.read_only(on=False)

    async def _fill_disk(self) -> None:
        await asyncio.to_thread(self._cluster.primary.fill_disk)
        await asyncio.sleep(self._chance.uniform(0.3, 1.5))
        await self._cluster.heal()

    def _later(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
