"""Hints between processes over NOTIFY: coalesced, sent off the write path, never relied upon."""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable
from typing import Any

from flowfabric.db.database import Database
from flowfabric.db.session import close
from flowfabric.pauses import is_set_within, pauses
from flowfabric.tasks import create_shared_task

logger = logging.getLogger(__name__)

EVERYTHING = "*"
"""The word of a hint that names nothing in particular."""

_LONGEST = 7_000
_SENDER = "@"
"""What the first word of a hint begins with when it names the sender; a hint without one is anybody's."""
_PROBE = "/* probe */ select pg_notify($1, '')"
_Callback = Callable[[list[str]], None]


class Hints:
    """Sends and hears the hints of one engine; a lost connection heals by itself and everything goes on by polling.

    Its own hints are not delivered to it: whoever sends one wakes the waiters of the same engine directly.
    """

    PAUSE = 0.005
    """Seconds between two hints of a busy process: what comes between them travels together."""
    AT_ONCE = 4
    """Hints that go without a pause after a quiet time; each pause without a hint earns one more."""
    RECONNECT_SECONDS = (0.1, 1.0)
    """The first and the longest pause before a lost listener connects again."""
    LISTEN_SECONDS = 2.0
    """How long whoever begins to listen waits for the connection, which goes on to be made behind him."""
    CLOSE_SECONDS = 1.0
    """How long the end waits for what is pending."""
    PROBE_SECONDS = 10.0
    """How often the listener proves that hints arrive; one over which they do not is tried again after as long."""
    PROBE_TIMEOUT_SECONDS = 2.0
    """How long the listener's own hint may take to reach it."""

    def __init__(self, database: Database, *, polls_only: bool = False) -> None:
        self._database = database
        self._polls_only = polls_only
        self._token = secrets.token_hex(6)
        self._pending: dict[str, set[str]] = {}
        self._callbacks: dict[str, list[_Callback]] = {}
        self._sender: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._listening = asyncio.Event()
        self._sending: Any = None
        self._credit = float(self.AT_ONCE)
        self._sent_at = time.monotonic()
        self._closed = False
        self._has_warned = False

    @property
    def is_listening(self) -> bool:
        """Whether hints of other processes arrive at the moment."""
        return self._listening.is_set()

    def send(self, channel: str, word: str = EVERYTHING) -> None:
        """Tell the other processes, soon and together with what else there is to tell."""
        if self._closed:
            return
        self._pending.setdefault(channel, set()).add(word)
        if self._sender is None or self._sender.done():
            self._sender = create_shared_task(self._send_pending())

    def subscribe(self, channel: str, callback: _Callback) -> None:
        """Call back with the words of every hint; `*` also after a gap in the listening."""
        self._callbacks.setdefault(channel, []).append(callback)

    def start_listening(self) -> bool:
        """Begin to listen, unless this process is deaf, listens already or is about to end; whether it was begun."""
        if self._polls_only or self._closed or self._listener is not None:
            return False
        self._listener = create_shared_task(self._keep_listening())
        return True

    async def listen(self) -> None:
        """Begin to listen and wait a moment for the connection, unless that was begun before."""
        if self.start_listening():
            await is_set_within(self._listening, self.LISTEN_SECONDS)

    async def close(self) -> None:
        """Send what is pending, then stop."""
        self._closed = True
        if self._sender is not None:
            await asyncio.wait((self._sender,), timeout=self.CLOSE_SECONDS)
        tasks = [task for task in (self._sender, self._listener) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._sending is not None:
            await close(self._sending, seconds=self.CLOSE_SECONDS)

    async def _send_pending(self) -> None:
        while self._pending:
            pending, self._pending = self._pending, {}
            try:
                if self._sending is None or self._sending.is_closed():
                    # The hint needs an answer, not a flush: what it hints at is on disk already.
                    self._sending = await self._database.connect(synchronous_commit="off")
                for channel, words in pending.items():
                    text = " ".join(sorted(words))
                    if EVERYTHING in words or len(text) > _LONGEST:
                        text = EVERYTHING
                    text = f"{self._sender_word} {text}"
                    await self._sending.execute("select pg_notify($1, $2)", self._channel(channel), text)
            except Exception as error:
                logger.debug("hint not sent: %s", error)
                if self._sending is not None:
                    self._sending.terminate()
            now = time.monotonic()
            self._credit = min(self.AT_ONCE, self._credit + (now - self._sent_at) / self.PAUSE) - 1
            self._sent_at = now
            if self._credit < 1:
                await asyncio.sleep(self.PAUSE)

    async def _keep_listening(self) -> None:
        reconnects = pauses(*self.RECONNECT_SECONDS)
        while True:
            try:
                connection = await self._database.connect(synchronous_commit="off")
            except Exception as error:
                logger.debug("not listening: %s", error)
                await asyncio.sleep(next(reconnects))
                continue
            is_deaf = False
            try:
                for channel in self._callbacks:
                    await connection.add_listener(self._channel(channel), self._heard)
                is_deaf = await self._listen_on(connection)
            except Exception as error:
                logger.debug("listening ended: %s", error)
            finally:
                if self._listening.is_set():
                    reconnects = pauses(*self.RECONNECT_SECONDS)
                self._listening.clear()
                connection.terminate()
            await asyncio.sleep(self.PROBE_SECONDS if is_deaf else next(reconnects))

    async def _listen_on(self, connection: Any) -> bool:
        """Listen until the connection is lost or proves deaf, and say which: each proof is a hint to this listener."""
        lost, heard = asyncio.Event(), asyncio.Event()
        connection.add_termination_listener(lambda _: lost.set())
        channel = f"flowfabric_alive_{connection.get_server_pid()}"
        await connection.add_listener(channel, lambda *_: heard.set())
        while not lost.is_set():
            heard.clear()
            await connection.execute(_PROBE, channel)
            if not await is_set_within(heard, self.PROBE_TIMEOUT_SECONDS):
                self._warn_of_deafness()
                return True
            if not self._listening.is_set():
                self._listening.set()
                # What was sent while nobody listened is unknown.
                for channel_heard in self._callbacks:
                    self._deliver(channel_heard, [EVERYTHING])
            await is_set_within(lost, self.PROBE_SECONDS)
        return False

    def _warn_of_deafness(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "LISTEN receives nothing over this connection (a pooler in transaction mode?): polling instead;"
                " set FF_LISTEN=false to stop trying"
            )

    @property
    def _sender_word(self) -> str:
        # With the process id: a forked process has the token of its parent.
        return f"{_SENDER}{self._token}.{os.getpid()}"

    def _channel(self, channel: str) -> str:
        return f"{self._database.schema}_{channel}"

    def _heard(self, _connection: object, _pid: int, channel: str, payload: str) -> None:
        words = payload.split(" ")
        if words[0].startswith(_SENDER) and words.pop(0) == self._sender_word:
            return
        self._deliver(channel.removeprefix(f"{self._database.schema}_"), words)

    def _deliver(self, channel: str, words: list[str]) -> None:
        for callback in self._callbacks.get(channel, ()):
            callback(words)
