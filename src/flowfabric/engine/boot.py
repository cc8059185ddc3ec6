"""Opening a store: the server, the schema this code can run on, and what is written at the first start."""

import asyncio

from flowfabric.db import migrate
from flowfabric.db.database import Database
from flowfabric.db.embedded import Embedded, EmbeddedError
from flowfabric.db.faults import StoreFault
from flowfabric.db.notify import Hints
from flowfabric.db.revival import Revival
from flowfabric.db.session import NO_LIMITS, Limits, connect
from flowfabric.engine.keys import Keys
from flowfabric.engine.store import SQL, Rules, Store, error_of
from flowfabric.model.errors import UnavailableError, error
from flowfabric.model.ids import LaneId, Partitions
from flowfabric.model.outcomes import Applied, NoOp
from flowfabric.model.seals import Seals
from flowfabric.settings import PREFIX, Settings

CLOSE_SECONDS = 2


class Boot:
    """The connection of one engine to its store, from start to close."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        embedded: Embedded | None,
        revival: Revival | None,
        beside: "Boot | None" = None,
    ) -> None:
        self.settings = settings
        self._is_beside = beside is not None
        self._database = database
        self._embedded = embedded
        self._revival = revival
        self.hints = Hints(database, deaf=not settings.listen)
        self.store = Store(
            database,
            self.hints,
            Rules(
                partitions=Partitions(
                    flow=settings.flow_partitions, budget=settings.budget_partitions, quota=settings.quota_partitions
                ),
                instance_tag=settings.instance_tag,
                tell_renewals=settings.lease_renewal_events,
                retention_ms=settings.retention_ms,
                feed_retention_ms=settings.feed_retention_ms,
            ),
        )
        self.keys: Keys = Keys(self.store, Seals(settings.secret_keys), {} if beside is None else beside.keys.known)

    @classmethod
    async def open(cls, settings: Settings, *, beside: "Boot | None" = None) -> "Boot":
        """Connect, starting the embedded server where no other is named, and prepare the schema.

        Beside another of the same process, which has read the keys and holds the embedded server, it uses both.
        """
        held: Embedded | None = None
        url = settings.database_url
        try:
            if url is None:
                held = await asyncio.to_thread(Embedded.start, settings.home)
                url = held.url
            embedded = held if beside is None else beside._embedded
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
            boot = cls(settings, database, embedded, revival, beside)
            try:
                await boot.prepare()
            except BaseException:
                await database.close()
                raise
        except BaseException as failed:
            if held is not None:
                await asyncio.to_thread(held.release)
            match failed:
                case EmbeddedError():
                    raise error("unavailable", str(failed)) from failed
                case StoreFault():
                    raise error_of(failed) from failed
                case _:
                    raise
        return boot

    @property
    def address(self) -> Settings:
        """The settings that lead another engine to the same store, as it stands."""
        return self.settings.model_copy(update={"database_url": self._database.url, "migrate_on_start": False})

    async def prepare(self) -> NoOp | Applied:
        """Bring the store to where this code can run on it; safe to call at any time, from any number of processes."""
        done = await self.store.answer(self._prepare_schema())
        counts = self.store.rules.partitions
        given = {"flow": counts.flow, "budget": counts.budget, "quota": counts.quota}
        while not (rows := await self.store.fetch(SQL.insert_configuration, **given)):
            pass
        (row,) = rows
        stored = Partitions(flow=row["flow_partitions"], budget=row["budget_partitions"], quota=row["quota_partitions"])
        if stored != counts:
            raise UnavailableError(
                "unavailable", f"the store was made with {_variables(stored)}, this process has {_variables(counts)}"
            )
        for lane in self.settings.lanes:
            await self.store.lane_no(LaneId(lane), registered_by="configuration")
        if not self._is_beside:
            secret = self.settings.waitpoint_hmac_secret
            done += await self.keys.prepare(
                None if secret is None else secret.get_secret_value(), may_generate=self._embedded is not None
            )
        return Applied(description=", ".join(done)) if done else NoOp()

    async def _prepare_schema(self) -> list[str]:
        schema = self._database.schema
        try:
            if self.settings.migrates:
                return [migration.file for migration in await self._migrate(schema)]
            async with self._database.acquire() as connection:
                status = await migrate.check(connection, schema=schema)
        except migrate.MigrationError as refused:
            raise error("unavailable", str(refused)) from refused
        if not status.runs:
            raise error("unavailable", status.text)
        return []

    async def _migrate(self, schema: str) -> list[migrate.Migration]:
        connection = await connect(self._database.url, schema=schema, limits=NO_LIMITS)
        try:
            return await migrate.migrate(connection, schema=schema)
        finally:
            await connection.close(timeout=CLOSE_SECONDS)

    async def close(self) -> None:
        """Give back every connection, and the embedded server."""
        await self.hints.close()
        await self._database.close()
        if self._revival is not None:
            await self._revival.close()
        if self._embedded is not None and not self._is_beside:
            await asyncio.to_thread(self._embedded.release)


def _variables(counts: Partitions) -> str:
    return " ".join(
        f"{PREFIX}{family}_PARTITIONS={count}"
        for family, count in (("FLOW", counts.flow), ("BUDGET", counts.budget), ("QUOTA", counts.quota))
    )
