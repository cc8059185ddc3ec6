"""The lifecycle of an engine: connect, prepare the schema and the keys, and close after the calls in progress."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flowfabric.db import migrate
from flowfabric.db.address import database_of, server_of
from flowfabric.db.database import Database, Record
from flowfabric.db.embedded import Embedded, EmbeddedError
from flowfabric.db.faults import StoreFault, fault_of, without_values
from flowfabric.db.notify import Hints
from flowfabric.db.off_loop import off_loop
from flowfabric.db.pooler import pooler_problem
from flowfabric.db.revival import Revival
from flowfabric.db.rights import Rights, rights_of
from flowfabric.db.session import NO_LIMITS, Limits, close, connect, ignored_settings
from flowfabric.db.unreachable import Unreachable
from flowfabric.engine.core.keys import Keys
from flowfabric.engine.event.origin import keep_origin
from flowfabric.engine.flow.cancel import FlowCancel
from flowfabric.engine.lease.claim import Claim
from flowfabric.engine.store import SQL, Rules, Store, error_of
from flowfabric.model.errors import EngineError, TransportError, error, reason_of
from flowfabric.model.ids import LaneId, Partitions
from flowfabric.model.seal import Seals
from flowfabric.model.support import Applied, NothingToPrepare
from flowfabric.model.text import check_range
from flowfabric.settings import PREFIX, Settings

CLOSE_SECONDS = 2
DRAIN_SECONDS = 3.0
"""How long closing waits for calls in progress."""
MAX_GRACE_MS = 2**32 - 1

StoreKey = tuple[str, str, str]
"""The server, the database and the schema of a store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Readiness:
    """Whether a process can start on a store: the status of its schema, and what prevents a start."""

    status: migrate.SchemaStatus
    problem: str | None
    ignored: tuple[str, ...]
    """The session settings that were requested and are not in effect."""


class Lifecycle:
    """The connection of one engine to its store, from start to close."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        embedded: Embedded | None,
        revival: Revival | None,
        first: "Lifecycle | None" = None,
    ) -> None:
        self.settings = settings
        self._is_second = first is not None
        self._database = database
        self._embedded = embedded
        self._revival = revival
        self.store_key: StoreKey = (
            (server_of(database.url), database_of(database.url), database.schema) if first is None else first.store_key
        )
        """Identifies the store: equal for every engine of this process on the same store."""
        # One connection for LISTEN per process: a second engine serves a thread that waits for no other process.
        self.hints = Hints(database, polls_only=not settings.listen or first is not None)
        self.store: Store = Store(
            database,
            self.hints,
            Rules(
                partitions=Partitions(
                    flow=settings.flow_partitions, budget=settings.budget_partitions, quota=settings.quota_partitions
                ),
                instance_tag=settings.instance_tag,
                renewal_events=settings.lease_renewal_events,
                retention_ms=settings.retention_ms,
                feed_retention_ms=settings.feed_retention_ms,
            ),
            first=None if first is None else first.store,
        )
        self.keys: Keys = Keys(self.store, Seals(settings.secret_keys), {} if first is None else first.keys.known)

    @classmethod
    async def open(cls, settings: Settings, *, first: "Lifecycle | None" = None) -> "Lifecycle":
        """Connect, starting the embedded server if no address is configured, and prepare the schema.

        With `first`, share the signing keys and the embedded server of that engine of this process.
        """
        return await cls._opened(settings, first, cls.prepare)

    @classmethod
    async def check(cls, settings: Settings) -> Readiness:
        """Check whether a process with these settings could start; change nothing."""
        lifecycle = await cls._opened(settings, None, None)
        try:
            return await lifecycle.store.answer(lifecycle._readiness())
        finally:
            await lifecycle.close()

    @classmethod
    async def _opened(
        cls, settings: Settings, first: "Lifecycle | None", prepare: "Callable[[Lifecycle], Awaitable[object]] | None"
    ) -> "Lifecycle":
        started: Embedded | None = None
        url = settings.database_url
        try:
            if url is None:
                started = await off_loop(lambda: Embedded.start(settings.home))
                url = started.url
            embedded = started if first is None else first._embedded
            revival = None if embedded is None else Revival(embedded)
            database = await Database.open(
                url,
                schema=settings.schema_name,
                pool_size=settings.database_pool_size,
                limits=Limits(
                    statement_ms=settings.statement_timeout_ms,
                    idle_in_transaction_ms=settings.idle_in_transaction_timeout_ms,
                ),
                revive=revival,
            )
            lifecycle = cls(settings, database, embedded, revival, first)
            try:
                if prepare is not None:
                    await prepare(lifecycle)
            except BaseException:
                await database.close()
                raise
        except BaseException as failed:
            if started is not None:
                await off_loop(started.release)
            match failed:
                case EmbeddedError():
                    raise error("unavailable", str(failed)) from None
                case Unreachable():
                    # The message is complete; the driver's traceback would bury it.
                    raise error_of(failed) from None
                case StoreFault():
                    raise error_of(failed) from failed
                case _:
                    raise
        return lifecycle

    @property
    def address(self) -> Settings:
        """Settings that connect another engine to this store without migrating it."""
        return self.settings.model_copy(update={"database_url": self._database.url, "migrate_on_start": False})

    async def prepare(self) -> NothingToPrepare | Applied:
        """Prepare the store for this version: schema, partition counts, lanes, signing key.

        Idempotent, and safe to call from any number of processes at the same time.
        """
        rights = None if self._is_second else await self.store.answer(self._rights())
        if rights is not None:
            self._check_writable(rights)
        done = await self.store.answer(self._prepare_schema())
        if rights is not None:
            self._check_rights(rights)
            # Checked first: stored partition counts cannot be changed, so a start without a key must not store them.
            await self.keys.check(self._secret, may_generate=self._embedded is not None)
        counts = self.store.rules.partitions
        given = {"flow": counts.flow, "budget": counts.budget, "quota": counts.quota}
        while not (rows := await self.store.fetch(SQL.insert_configuration, **given)):
            pass
        self._check_counts(rows[0])
        for lane in self.settings.lanes:
            await self.store.lane_no(LaneId(lane), registered_by="configuration")
        if await keep_origin(self.store):
            done.append("events restored from another server")
        if not self._is_second:
            done += await self.keys.prepare(self._secret, may_generate=self._embedded is not None)
        return Applied(description=", ".join(done)) if done else NothingToPrepare()

    @property
    def _secret(self) -> str | None:
        given = self.settings.waitpoint_hmac_secret
        return None if given is None else given.get_secret_value()

    def _check_counts(self, row: Record) -> None:
        counts = self.store.rules.partitions
        stored = Partitions(flow=row["flow_partitions"], budget=row["budget_partitions"], quota=row["quota_partitions"])
        if stored != counts:
            raise error(
                "unavailable",
                f"the store was created with {_variables(stored)}, this process has {_variables(counts)};"
                " set the counts of the store",
            )

    async def _rights(self) -> Rights:
        database = self._database
        async with database.acquire() as connection:
            return await rights_of(connection, url=database.url, schema=database.schema, names=migrate.created_names())

    @staticmethod
    def _check_writable(rights: Rights) -> None:
        if rights.read_only is not None:
            raise TransportError("busy_loading", rights.read_only)

    @staticmethod
    def _check_rights(rights: Rights) -> None:
        if rights.missing is not None:
            raise error("unavailable", rights.missing)

    @property
    def _folder(self) -> Path | None:
        return None if self._embedded is None else self._embedded.data.parent

    async def _prepare_schema(self) -> list[str]:
        schema = self._database.schema
        try:
            if self.settings.migrates:
                return [migration.file for migration in await self._migrate(schema)]
            status, ignored = await self._schema_status()
        except migrate.MigrationError as refused:
            raise error("unavailable", str(refused)) from None
        if not status.runs:
            raise error("unavailable", status.text)
        self._check_search_path(ignored)
        return []

    async def _schema_status(self) -> tuple[migrate.SchemaStatus, tuple[str, ...]]:
        """The status of the schema, and the session settings that are not in effect."""
        schema = self._database.schema
        async with self._database.acquire() as connection:
            status = await migrate.check(connection, schema=schema, folder=self._folder)
            return status, await ignored_settings(connection, schema, self._database.limits)

    def _check_search_path(self, ignored: tuple[str, ...]) -> None:
        if "search_path" in ignored:
            raise error(
                "unavailable",
                f"the session setting search_path={self._database.schema} is not in effect: a pooler in front of"
                f" {server_of(self._database.url)} ignores session settings; set them on the role, see"
                " docs/pgbouncer.md",
            )

    async def _check_pooler(self) -> None:
        if self._embedded is None and (problem := await pooler_problem(self._database.connect)) is not None:
            raise error("unavailable", f"{server_of(self._database.url)}: {problem}")

    async def _migrate(self, schema: str) -> list[migrate.Migration]:
        connection = await connect(self._database.url, schema=schema, limits=NO_LIMITS)
        try:
            return await migrate.migrate(connection, schema=schema, folder=self._folder)
        except Exception as failed:
            fault = fault_of(failed)
            if fault is None:
                raise
            raise fault from without_values(failed)
        finally:
            await close(connection, seconds=CLOSE_SECONDS)

    async def _readiness(self) -> Readiness:
        status, ignored = await self._schema_status()
        if not status.runs:
            return Readiness(status=status, problem=status.text, ignored=ignored)
        try:
            self._check_search_path(ignored)
            await self._check_pooler()
            rights = await self._rights()
            self._check_writable(rights)
            self._check_rights(rights)
            for row in await self.store.fetch(SQL.list_configuration):
                self._check_counts(row)
            await self.keys.check(self._secret, may_generate=self._embedded is not None)
        except EngineError as refused:
            return Readiness(status=status, problem=reason_of(refused), ignored=ignored)
        return Readiness(status=status, problem=None, ignored=ignored)

    async def close(self) -> None:
        """Close every connection, and release the embedded server."""
        await self.hints.close()
        await self._database.close()
        if self._revival is not None:
            await self._revival.close()
        if self._embedded is not None and not self._is_second:
            await off_loop(self._embedded.release)


class Waits(Protocol):
    """A service whose callers wait for something."""

    def refuse(self) -> None:
        """Fail current waiters and reject new ones."""


class Shutdown:
    """Ends waits and drains the calls in progress before a process stops or the engine closes."""

    def __init__(
        self,
        claims: Claim,
        flow_cancel: FlowCancel,
        waits: Sequence[Waits],
        drains: Sequence[Callable[[], Awaitable[None]]],
    ) -> None:
        self._claims = claims
        self._flow_cancel = flow_cancel
        self._waits = waits
        self._drains = drains

    async def shutdown_prepare(self, grace_ms: int) -> None:
        """Fail current waiters, reject new ones, and finish the calls in progress.

        Raises `timeout` if they take longer than `grace_ms`.
        """
        check_range(grace_ms, "grace_ms", 0, MAX_GRACE_MS)
        began = time.monotonic()
        self._claims.refuse_waits()
        for each in self._waits:
            each.refuse()
        try:
            async with asyncio.timeout(grace_ms / 1000):
                for drain in (self._claims.wait_idle, *self._drains):
                    await drain()
        except TimeoutError:
            elapsed_ms = round((time.monotonic() - began) * 1000)
            raise error("timeout", {"op": "shutdown_prepare", "elapsed_ms": elapsed_ms}) from None

    async def close(self) -> None:
        """End waits and finish the calls in progress; abandon those that take longer than DRAIN_SECONDS.

        Members of cancelled flows that this engine is cancelling get more time.
        """
        for each in self._waits:
            each.refuse()
        await self._flow_cancel.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                for drain in (self._claims.drain, *self._drains):
                    await drain()


def _variables(counts: Partitions) -> str:
    return " ".join(
        f"{PREFIX}{family}_PARTITIONS={count}"
        for family, count in (("FLOW", counts.flow), ("BUDGET", counts.budget), ("QUOTA", counts.quota))
    )
