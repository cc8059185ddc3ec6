"""Hints between processes over NOTIFY: batched, sent outside of transactions, and never required for correctness."""

import asyncio
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from flowfabric.db.database import Database
from flowfabric.db.session import close
from flowfabric.pauses import is_set_within, pauses
from flowfabric.tasks import create_shared_task

logger = logging.getLogger(__name__)

EVERYTHING = "*"
"""The word of a hint that may concern anything."""

_MAX_BYTES = 7_000
"""The longest text of words in one notification; Postgres allows 8,000 bytes with the sender."""
_MAX_TEXTS = 4
"""How many notifications the words of one hint may take; beyond that, the hint becomes `*`."""
_MAX_NAME = 63
"""The longest name of a channel in Postgres."""
_SENDER = "@"
"""The prefix of the first word of a hint that names its sender; a hint without a sender is for everyone."""
_NOTIFY = "select pg_notify(channel, text) from unnest($1::text[], $2::text[]) as hint(channel, text)"
_PING = "/* listener */ select"
_Callback = Callable[[list[str]], None]


class Hints:
    """Sends and receives the hints of one engine; reconnects after a loss, while callers keep polling.

    An engine does not receive its own hints: the sender wakes the waiters of the same engine directly.
    """

    PAUSE = 0.005
    """Seconds between two hints of a busy process; hints sent in between are batched."""
    AT_ONCE = 4
    """How many hints are sent without a pause after an idle time; each idle pause allows one more."""
    WAIT_SECONDS = 0.1
    """How long a hint that can wait waits for another one to be sent with."""
    RECONNECT_SECONDS = (0.1, 1.0)
    """The first and the longest pause before a lost listener reconnects."""
    LISTEN_SECONDS = 2.0
    """How long `listen` waits for the connection; after that, connecting continues in the background."""
    SEND_SECONDS = 2.0
    """How long sending may take before the connection is considered dead."""
    CLOSE_SECONDS = 1.0
    """How long `close` waits until pending hints are sent."""
    PROBE_SECONDS = 10.0
    """How often the listener probes whether hints arrive, and how long it waits before it reconnects if they do not."""
    PROBE_TIMEOUT_SECONDS = 2.0
    """How long a probe may take to arrive."""

    def __init__(self, database: Database, *, polls_only: bool = False) -> None:
        self._database = database
        self._polls_only = polls_only
        self._token = secrets.token_hex(6)
        self._pending: dict[str, set[str]] = {}
        self._waiting: asyncio.TimerHandle | None = None
        self._callbacks: dict[str, list[_Callback]] = {}
        self._sender: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._listening = asyncio.Event()
        self._sending: Any = None
        self._sending_lock = asyncio.Lock()
        self._credit = float(self.AT_ONCE)
        self._sent_at = time.monotonic()
        self._closed = False
        self._has_warned = False

    @property
    def is_listening(self) -> bool:
        """Whether hints of other processes arrive now."""
        return self._listening.is_set()

    def send(self, channel: str, word: str = EVERYTHING, *, can_wait: bool = False) -> None:
        """Queue a hint for the other processes; it is sent soon, batched with other pending hints.

        A hint that can wait is sent with the next one that cannot, or after `WAIT_SECONDS`.
        """
        if self._closed:
            return
        self._pending.setdefault(channel, set()).add(word)
        if not can_wait:
            self._start_sending()
        elif self._waiting is None and not self._is_sending:
            self._waiting = asyncio.get_running_loop().call_later(self.WAIT_SECONDS, self._start_sending)

    def subscribe(self, channel: str, callback: _Callback) -> None:
        """Call back with the words of every hint on a channel, and with `*` after a gap in listening."""
        self._callbacks.setdefault(channel, []).append(callback)

    def start_listening(self) -> bool:
        """Start to listen unless this process only polls, listens already or is closing; return whether it started."""
        if self._polls_only or self._closed or self._listener is not None:
            return False
        self._listener = create_shared_task(self._keep_listening())
        return True

    async def listen(self) -> None:
        """Start to listen and wait briefly for the connection; return at once if already started."""
        if self.start_listening():
            await is_set_within(self._listening, self.LISTEN_SECONDS)

    async def close(self) -> None:
        """Send pending hints, then stop."""
        self._closed = True
        if self._waiting is not None:
            self._start_sending()
        if self._sender is not None:
            await asyncio.wait((self._sender,), timeout=self.CLOSE_SECONDS)
        tasks = [task for task in (self._sender, self._listener) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._sending is not None:
            await close(self._sending, seconds=self.CLOSE_SECONDS)

    @property
    def _is_sending(self) -> bool:
        return self._sender is not None and not self._sender.done()

    def _start_sending(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        if self._pending and not self._is_sending:
            self._sender = create_shared_task(self._send_pending())

    async def _send_pending(self) -> None:
        while self._pending:
            pending, self._pending = self._pending, {}
            try:
                await self._notify(
                    (self._channel(channel), f"{self._sender_word} {text}")
                    for channel, words in pending.items()
                    for text in _texts(words)
                )
            except Exception as error:
                logger.debug("hint not sent: %s", error)
            now = time.monotonic()
            self._credit = min(self.AT_ONCE, self._credit + (now - self._sent_at) / self.PAUSE) - 1
            self._sent_at = now
            if self._credit < 1:
                await asyncio.sleep(self.PAUSE)

    async def _notify(self, notifications: Iterable[tuple[str, str]]) -> None:
        """Send the texts to the channels in one statement: each commit locks the notifications of the whole server."""
        channels, texts = zip(*notifications, strict=True)
        async with self._sending_lock:
            try:
                if self._sending is None or self._sending.is_closed():
                    # No flush needed: the change that a hint announces is already on disk.
                    self._sending = await self._database.connect(synchronous_commit="off")
                await self._sending.execute(_NOTIFY, channels, texts, timeout=self.SEND_SECONDS)
            except Exception:
                if self._sending is not None:
                    self._sending.terminate()
                raise

    async def _keep_listening(self) -> None:
        reconnects = pauses(*self.RECONNECT_SECONDS)
        while True:
            try:
                connection = await self._database.connect(synchronous_commit="off")
            except Exception as error:
                logger.debug("cannot listen for hints: %s", error)
                await asyncio.sleep(next(reconnects))
                continue
            probe_failed = False
            try:
                for channel in self._callbacks:
                    await connection.add_listener(self._channel(channel), partial(self._receive, channel))
                probe_failed = await self._listen_on(connection)
            except Exception as error:
                logger.debug("stopped listening for hints: %s", error)
            finally:
                if self._listening.is_set():
                    reconnects = pauses(*self.RECONNECT_SECONDS)
                self._listening.clear()
                connection.terminate()
            await asyncio.sleep(self.PROBE_SECONDS if probe_failed else next(reconnects))

    async def _listen_on(self, connection: Any) -> bool:
        """Listen until the connection is lost or a probe does not arrive; return whether a probe did not arrive."""
        lost, arrived = asyncio.Event(), asyncio.Event()
        token = ""

        def end(_: object) -> None:
            lost.set()
            arrived.set()

        def receive(_connection: object, _pid: int, _channel: str, text: str) -> None:
            if text == token:
                arrived.set()

        connection.add_termination_listener(end)
        # The same name after every reconnect: a pooler's server connection keeps the subscriptions of its clients.
        channel = f"flowfabric_alive_{self._token}_{os.getpid()}"
        await connection.add_listener(channel, receive)
        while not lost.is_set():
            arrived.clear()
            token = secrets.token_hex(8)
            # A connection that does not answer is lost; one that answers but does not get the probe receives no
            # notifications.
            await connection.execute(_PING, timeout=self.PROBE_TIMEOUT_SECONDS)
            # Sent by another session while this one is idle: a pooler in transaction mode forwards notifications only
            # to the session that is running a statement.
            await self._notify([(channel, token)])
            if not await is_set_within(arrived, self.PROBE_TIMEOUT_SECONDS):
                self._warn_about_polling()
                return True
            if not self._listening.is_set() and not lost.is_set():
                self._listening.set()
                # Hints may have been missed before.
                for subscribed in self._callbacks:
                    self._deliver(subscribed, [EVERYTHING])
            await is_set_within(lost, self.PROBE_SECONDS)
        return False

    def _warn_about_polling(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "LISTEN receives nothing over this connection (a pooler in transaction mode?): polling instead;"
                " set FF_LISTEN=false to stop trying"
            )

    @property
    def _sender_word(self) -> str:
        # Includes the process id: a forked process has the token of its parent.
        return f"{_SENDER}{self._token}.{os.getpid()}"

    def _channel(self, channel: str) -> str:
        name = f"{self._database.schema}_{channel}"
        if len(name) <= _MAX_NAME:
            return name
        # LISTEN would cut the name, and pg_notify would refuse it.
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        return f"{name[: _MAX_NAME - len(digest) - 1]}_{digest}"

    def _receive(self, channel: str, _connection: object, _pid: int, _name: str, text: str) -> None:
        words = text.split(" ")
        if words[0].startswith(_SENDER) and words.pop(0) == self._sender_word:
            return
        self._deliver(channel, words)

    def _deliver(self, channel: str, words: list[str]) -> None:
        for callback in self._callbacks.get(channel, ()):
            callback(words)


def _texts(words: Iterable[str]) -> list[str]:
    """The words joined to texts that fit into one notification each; only `*` if there are too many words."""
    texts: list[list[str]] = []
    room = 0
    for word in sorted(words):
        length = len(word.encode()) + 1
        if length > room:
            texts.append([])
            room = _MAX_BYTES
        if word == EVERYTHING or length > room or len(texts) > _MAX_TEXTS:
            return [EVERYTHING]
        texts[-1].append(word)
        room -= length
    return [" ".join(text) for text in texts]
