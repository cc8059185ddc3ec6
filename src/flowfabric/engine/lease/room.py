"""Who waits for room in a limit, and when it is worth to try again."""

import asyncio
from collections.abc import Iterable

from flowfabric.engine.core.wakeups import Wakeups


class RoomWaits:
    """Wakes the claims of lanes whose work was denied: a key of a quota has room again, or a rate lets more through."""

    MAX_KEYS = 10_000
    """For how many keys it is remembered when they last got room."""

    def __init__(self, wakeups: Wakeups) -> None:
        self._wakeups = wakeups
        self._nth = 0
        self._freed: dict[int, int] = {}
        self._all_freed = 0
        self._lanes: dict[int, set[str]] = {}
        self._queues: dict[int, set[int]] = {}
        self._timers: dict[tuple[str, ...], asyncio.TimerHandle] = {}
        wakeups.on_room(self._wake)

    @property
    def nth(self) -> int:
        """How often keys have got room."""
        return self._nth

    def add(
        self,
        lanes: tuple[str, ...],
        keys_of_queues: Iterable[tuple[int, Iterable[int]]],
        retry_after_ms: int | None,
        *,
        since: int,
    ) -> None:
        """Wake these lanes when one of these keys has room, or has got room since, or after this time."""
        freed: set[int] = set()
        for queue_no, quota_key_nos in keys_of_queues:
            for key_no in quota_key_nos:
                self._lanes.setdefault(key_no, set()).update(lanes)
                self._queues.setdefault(key_no, set()).add(queue_no)
                if self._freed.get(key_no, self._all_freed) > since:
                    freed.add(key_no)
        if freed:
            self._wake_keys(freed)
        if retry_after_ms is not None:
            if (timer := self._timers.pop(lanes, None)) is not None:
                timer.cancel()
            loop = asyncio.get_running_loop()
            self._timers[lanes] = loop.call_later(retry_after_ms / 1000, self._wakeups.wake, lanes)

    def close(self) -> None:
        """Wake nobody any more."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _wake(self, quota_key_nos: Iterable[int] | None) -> None:
        self._nth += 1
        if quota_key_nos is None:
            keys = {*self._lanes}
        else:
            keys = {*quota_key_nos}
            self._freed.update(dict.fromkeys(keys, self._nth))
        if quota_key_nos is None or len(self._freed) > self.MAX_KEYS:
            self._freed.clear()
            self._all_freed = self._nth
        self._wake_keys(keys)

    def _wake_keys(self, keys: Iterable[int]) -> None:
        lanes = {lane for key_no in keys for lane in self._lanes.pop(key_no, ())}
        queues = {queue_no for key_no in keys for queue_no in self._queues.pop(key_no, ())}
        if queues:
            for turns in self._wakeups.watermarks.all_turns():
                turns.resume(queues)
        self._wakeups.wake(lanes)
