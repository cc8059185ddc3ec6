"""Random faults from a seed: which, how long, and how they are healed."""

import asyncio
import contextlib
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable

import asyncpg

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
_ERRORS = (ClusterError, OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)

KILL, STOP = "kill a process", "stop a process past its lease"
CUT, SILENCE = "cut connections", "silence connections"
DROP, REFUSE = "drop answers", "refuse connections"
FAST, IMMEDIATE, FAILOVER = "fast restart", "immediate restart", "failover"
LOCKS, READ_ONLY, FULL_DISK = "lock rows", "read-only server", "full disk"
WEIGHTS = {
    **{KILL: 5, STOP: 4, CUT: 5, SILENCE: 4, DROP: 6, REFUSE: 2, LOCKS: 3, READ_ONLY: 2},
    **{FAST: 1, IMMEDIATE: 1, FAILOVER: 2, FULL_DISK: 1},
}
"""The weights of the faults."""


class Injector:
    """Injects faults into processes, connections and servers.

    `pace` is a factor for the duration of faults and the pauses between them.
    """

    def __init__(
        self,
        cluster: Cluster,
        proxy: ProxyProcess,
        processes: Processes,
        history: History,
        rng: random.Random,
        *,
        lease_ms: int,
        pace: float,
    ) -> None:
        self.injected: Counter[str] = Counter()
        self._cluster = cluster
        self._proxy = proxy
        self._processes = processes
        self._history = history
        self._rng = rng
        self._lease_ms = lease_ms
        self._pace = pace
        self._tasks: set[asyncio.Task[None]] = set()
        self._faults: dict[str, Callable[[], Awaitable[None]]] = {
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
        self.skipped: dict[str, str] = {}
        """The faults that cannot be injected here, and why."""
        if cluster.standby is not None:
            self._faults[FAILOVER] = self._failover
        else:
            self.skipped[FAILOVER] = "no standby"
        if cluster.has_small_disk:
            self._faults[FULL_DISK] = self._fill_disk
        else:
            self.skipped[FULL_DISK] = "the data is not on a tmpfs of its own, which root can mount"

    async def inject(self, seconds: float) -> None:
        """Inject every kind of fault once in random order, and then random ones until this time has passed."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        first = list(self._faults)
        self._rng.shuffle(first)
        while first or loop.time() < until:
            name = first.pop() if first else self._chosen()
            self._history.record("fault", name=name)
            self.injected[name] += 1
            try:
                await self._faults[name]()
            except _ERRORS as error:
                # A fault may prevent the next one.
                self._history.record("fault failed", name=name, detail=str(error))
                with contextlib.suppress(*_ERRORS):
                    await self._cluster.heal()
            await self._pause(0.1, 0.8)

    async def heal(self) -> None:
        """Heal every fault, except connections that were silenced forever."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._processes.resume()
        await self._cluster.heal()
        await self._proxy.do("redirect", url=self._cluster.primary.url)
        await self._proxy.do("refuse", on=False)

    def _chosen(self) -> str:
        names = list(self._faults)
        return self._rng.choices(names, [WEIGHTS[name] for name in names])[0]

    async def _kill(self) -> None:
        victim = self._rng.choice(self._processes.living())
        await self._processes.kill(victim)
        await self._pause(0, 0.5)
        self._processes.start(victim)

    async def _stop(self) -> None:
        running = [name for name in self._processes.living() if name not in self._processes.stopped]
        if not running:
            return
        victim = self._rng.choice(running)
        process = self._processes.stop(victim)

        async def resume(seconds: float) -> None:
            await asyncio.sleep(seconds)
            self._processes.stopped.discard(victim)
            send(process, signal.SIGCONT)

        self._later(resume(self._lease_ms / 1000 * self._rng.uniform(1.1, 2)))

    async def _cut(self) -> None:
        await self._proxy.do("cut", share=self._rng.choice((0.2, 0.5, 1)))

    async def _silence(self) -> None:
        sides = self._rng.choice((list(Side), [Side.CLIENT], [Side.SERVER]))
        seconds = self._rng.choice((None, None, self._pace * self._rng.uniform(0.5, 3)))
        await self._proxy.do("silence", share=self._rng.choice((0.2, 0.5, 1)), sides=sides, seconds=seconds)

    async def _drop(self) -> None:
        await self._proxy.do("drop", share=self._rng.choice((0.2, 0.5, 1)))

    async def _refuse(self) -> None:
        await self._proxy.do("refuse", on=True)
        await self._proxy.do("cut", share=0.5)
        await self._pause(0.2, 1)
        await self._proxy.do("refuse", on=False)

    async def _failover(self) -> None:
        primary = await self._cluster.failover()
        await self._proxy.do("redirect", url=primary.url)
        await self._cluster.rebuild()

    async def _lock(self) -> None:
        async def hold(seconds: float) -> None:
            with contextlib.suppress(*_ERRORS):
                connection = await self._cluster.connect()
                try:
                    await connection.execute(f"begin; {_LOCK}")
                    await asyncio.sleep(seconds)
                finally:
                    connection.terminate()

        self._later(hold(self._pace * self._rng.uniform(1, 4)))

    async def _read_only(self) -> None:
        await self._cluster.read_only(on=True)
        await self._pause(0.3, 1.5)
        await self._cluster.read_only(on=False)

    async def _fill_disk(self) -> None:
        await asyncio.to_thread(self._cluster.primary.fill_disk)
        await self._pause(0.3, 1.5)
        await self._cluster.heal()

    async def _pause(self, shortest: float, longest: float) -> None:
        await asyncio.sleep(self._pace * self._rng.uniform(shortest, longest))

    def _later(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
