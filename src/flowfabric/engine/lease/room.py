"""Who waits for room in a limit, and when it is worth to try again."""

import asyncio
from collections.abc import Collection, Iterable

from flowfabric.engine.core.wakeups import Wakeups

MAX_KEYS = 100_000
"""How many keys are remembered that have got room, and how many that claims wait for."""


class RoomWaits:
    """Wakes the claims of lanes whose work was denied: a key of a quota has room again, or a rate lets more through."""

    def __init__(self, wakeups: Wakeups) -> None:
        self._wakeups = wakeups
        self._lanes: dict[int, set[str]] = {}
        self._queues: dict[int, set[int]] = {}
        self._timers: dict[tuple[str, ...], asyncio.TimerHandle] = {}
        self._freed: dict[int, int] = {}
        self._all_freed = 0
        self.now = 0
        """How often keys have got room; read it before a claim, so that `add` misses none."""
        wakeups.on_room(self._wake)

    def add(
        self,
        lanes: tuple[str, ...],
        keys_of_queues: Iterable[tuple[int, Iterable[int]]],
        retry_after_ms: int | None,
        *,
        since: int,
    ) -> None:
        """Wake these lanes when one of these keys has room, or has got it after `since`, or after this time."""
        freed: set[int] = set()
        for queue_no, quota_key_nos in keys_of_queues:
            for key_no in quota_key_nos:
                self._lanes.setdefault(key_no, set()).update(lanes)
                self._queues.setdefault(key_no, set()).add(queue_no)
                if max(self._all_freed, self._freed.get(key_no, 0)) > since:
                    freed.add(key_no)
        if freed:
            self._resume(freed)
        if len(self._lanes) > MAX_KEYS:
            # The keys of rates get room without a hint. The claims that still wait for one add it again.
            self._resume([*self._lanes])
        if retry_after_ms is not None:
            loop = asyncio.get_running_loop()
            due = loop.time() + retry_after_ms / 1000
            # The first one counts: the claims that it wakes look at all that they wait for, and add the next.
            if (timer := self._timers.get(lanes)) is None or timer.when() > due:
                if timer is not None:
                    timer.cancel()
                self._timers[lanes] = loop.call_at(due, self._retry, lanes)

    def close(self) -> None:
        """Wake nobody any more."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _retry(self, lanes: tuple[str, ...]) -> None:
        self._timers.pop(lanes, None)
        self._wakeups.wake(lanes)

    def _wake(self, quota_key_nos: Iterable[int] | None) -> None:
        self.now += 1
        if quota_key_nos is None or len(self._freed) > MAX_KEYS:
            self._freed.clear()
            self._all_freed = self.now
        if quota_key_nos is None:
            self._resume([*self._lanes])
            return
        keys = [*quota_key_nos]
        self._freed.update(dict.fromkeys(keys, self.now))
        self._resume(keys)

    def _resume(self, keys: Collection[int]) -> None:
        lanes = {lane for key_no in keys for lane in self._lanes.pop(key_no, ())}
        queues = {queue_no for key_no in keys for queue_no in self._queues.pop(key_no, ())}
        if queues:
            for turns in self._wakeups.watermarks.all_turns():
                turns.resume(queues)
        self._wakeups.wake(lanes)
