"""The tags of executions, which can be set and read in any state."""

from collections.abc import Mapping

from flowfabric.db.database import Record, Transaction
from flowfabric.db.faults import StoreFault
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.row import lock_execution
from flowfabric.engine.store import Store, error_of
from flowfabric.model.errors import error
from flowfabric.model.event import EventFamily
from flowfabric.model.ids import ExecutionId, parse_execution_id, row_key
from flowfabric.model.tag import TagsSet, check_tag_key, check_tags
from flowfabric.model.text import check_text

SQL = statements_beside(__file__)


class Tags:
    """The tag operations."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def set_execution_tag(self, execution_id: ExecutionId | str, key: str, value: str) -> None:
        """Set one tag of an execution, replacing its old value."""
        await self._write(execution_id, {check_tag_key(key): check_text(value, "value")})

    async def set_execution_tags(self, execution_id: ExecutionId | str, tags: Mapping[str, str]) -> TagsSet:
        """Set tags of an execution in one transaction, replacing their old values."""
        checked = check_tags(tags)
        if not checked:
            raise error("invalid_input", "tags: must contain at least one tag, e.g. {'app.customer': 'acme'}")
        await self._write(execution_id, checked)
        return TagsSet(count=len(checked))

    async def get_execution_tag(self, execution_id: ExecutionId | str, key: str) -> str | None:
        """The value of one tag of an execution, or None if it is not set."""
        check_tag_key(key)
        partition, uuid = row_key(parse_execution_id(execution_id))
        rows = await self._store.fetch(SQL.read_tag, partition_key=partition, execution_id=uuid, key=key)
        return rows[0]["value"] if rows else None

    async def _write(self, execution_id: str, tags: Mapping[str, str]) -> None:
        parsed = parse_execution_id(execution_id)
        partition, uuid = row_key(parsed)
        instance_key = self._store.rules.instance_tag
        values: dict[str, object] = {
            "partition_key": partition,
            "execution_id": uuid,
            "keys": list(tags),
            "values": list(tags.values()),
            "instance_key": instance_key,
            "instance_tag": tags.get(instance_key),
        }

        async def write(transaction: Transaction) -> list[Record]:
            await lock_execution(transaction, parsed)
            return await transaction.fetch(SQL.set_tags, **values)

        try:
            if instance_key in tags:
                rows = await self._store.database.transact(write)
            else:
                rows = await self._store.database.fetch(SQL.set_tags, values)
        except StoreFault as fault:
            raise error_of(fault, f"execution {parsed}") from fault
        if not rows:
            raise error("execution_not_found", parsed)
        if rows[0]["has_events"]:
            self._store.wakeups.events(EventFamily.INSTANCE_TAG)
