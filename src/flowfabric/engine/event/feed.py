"""Subscriptions to the events of all executions."""

import asyncio
from functools import partial
from typing import Any

from flowfabric.engine.event.decoding import COMPLETION, INSTANCE_TAG, LEASE, OPERATOR, SIGNAL, Event, Feed
from flowfabric.engine.event.reader import Buffer, Reader
from flowfabric.engine.event.subscription import Subscription
from flowfabric.engine.store import Store
from flowfabric.model.cursor import InvalidCursor, decode_cursor
from flowfabric.model.errors import error
from flowfabric.model.feed import (
    AnyInstanceTagEvent,
    AnyLeaseEvent,
    CompletionEvent,
    OperatorEvent,
    ScannerFilter,
    SignalDeliveryEvent,
)
from flowfabric.model.position import Position
from flowfabric.model.text import shown
from flowfabric.tasks import create_shared_task

CLOSING = "the engine is closing"
Cursor = bytes | bytearray | memoryview
"""What is accepted as a cursor."""


class Feeds:
    """Opens subscriptions, and ends them when the engine shuts down."""

    def __init__(self, store: Store, *, queries: asyncio.Semaphore) -> None:
        self._store = store
        self._queries = queries
        self._loop = asyncio.get_running_loop()
        self._readers: dict[asyncio.Task[None], Buffer[Any]] = {}
        self._refuses = False

    def subscribe_completion(
        self, cursor: Cursor | None = b"", filter: ScannerFilter | None = None
    ) -> Subscription[CompletionEvent]:
        """Follow the ends of executions, and the waits that signals satisfied."""
        return self._subscribe(COMPLETION, cursor, filter)

    def subscribe_lease_history(
        self, cursor: Cursor | None = b"", filter: ScannerFilter | None = None
    ) -> Subscription[AnyLeaseEvent]:
        """Follow what happens to the leases of executions."""
        return self._subscribe(LEASE, cursor, filter)

    def subscribe_signal_delivery(
        self, cursor: Cursor | None = b"", filter: ScannerFilter | None = None
    ) -> Subscription[SignalDeliveryEvent]:
        """Follow the signals that were accepted, buffered, or recognised as duplicates."""
        return self._subscribe(SIGNAL, cursor, filter)

    def subscribe_operator_events(
        self, cursor: Cursor | None = b"", filter: ScannerFilter | None = None
    ) -> Subscription[OperatorEvent]:
        """Follow the actions of operators."""
        return self._subscribe(OPERATOR, cursor, filter)

    def subscribe_instance_tags(
        self, cursor: Cursor | None = b"", filter: ScannerFilter | None = None
    ) -> Subscription[AnyInstanceTagEvent]:
        """Follow the values of the instance tag of executions."""
        return self._subscribe(INSTANCE_TAG, cursor, filter)

    def refuse(self) -> None:
        """End current subscriptions with `stream_disconnected`, and reject new ones."""
        self._refuses = True
        for task, buffer in self._readers.items():
            buffer.disconnect(CLOSING, drops_queued=True)
            task.cancel()

    async def drain(self) -> None:
        """Wait until the readers of subscriptions that were ended have stopped."""
        if ended := [task for task in self._readers if task.cancelling()]:
            await asyncio.wait(ended)

    def _subscribe(self, feed: Feed[Event], cursor: Cursor | None, filter: ScannerFilter | None) -> Subscription[Event]:
        if isinstance(cursor, bytearray | memoryview):
            cursor = bytes(cursor)
        if not isinstance(cursor, bytes | None):
            hint = "; turn text from .hex() back with bytes.fromhex(...)" if isinstance(cursor, str) else ""
            raise error("invalid_input", f"cursor: must be bytes or None, got {shown(cursor)}{hint}")
        if not isinstance(filter, ScannerFilter | None):
            raise error("invalid_input", f"filter: must be a ScannerFilter or None, got {shown(filter)}")
        try:
            position = decode_cursor(cursor, feed.family) if cursor else None
        except InvalidCursor as reason:
            raise error(
                "invalid_input",
                f"cursor: {reason}; give {feed.operation} the cursor of one of its events, or none to start now",
            ) from None
        is_oldest = bool(cursor) and position is None
        return Subscription(
            cursor or b"",
            partial(self._start, feed, filter, position, is_oldest=is_oldest),
            operation=feed.operation,
            loop=self._loop,
        )

    async def _start(
        self,
        feed: Feed[Event],
        filter: ScannerFilter | None,
        position: Position | None,
        buffer: Buffer[Event],
        *,
        is_oldest: bool,
    ) -> tuple[Position, "asyncio.Task[None]"]:
        self._check_open(feed)
        reader = Reader(self._store, feed, filter, buffer, queries=self._queries)
        started = await reader.start(position, is_oldest=is_oldest)
        self._check_open(feed)
        task = create_shared_task(reader.run(started))
        self._readers[task] = buffer
        task.add_done_callback(self._readers.pop)
        return started, task

    def _check_open(self, feed: Feed[Event]) -> None:
        if self._refuses:
            raise error("unavailable", f"{feed.operation}: {CLOSING}")
