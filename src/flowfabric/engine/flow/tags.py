"""The tags of flows, which can be set and read in any state."""

from collections.abc import Mapping
from uuid import UUID

from flowfabric.db.statements import statements_beside
from flowfabric.engine.flow.row import check_flow_id
from flowfabric.engine.store import Store
from flowfabric.model.errors import error
from flowfabric.model.tag import TagsSet, check_tag_key, check_tags
from flowfabric.model.text import check_text

SQL = statements_beside(__file__)


class FlowTags:
    """The operations on tags of flows."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def set_flow_tag(self, flow_id: UUID | str, key: str, value: str) -> None:
        """Set one tag of a flow, replacing its old value."""
        await self._write(flow_id, {check_tag_key(key): check_text(value, "value")})

    async def set_flow_tags(self, flow_id: UUID | str, tags: Mapping[str, str]) -> TagsSet:
        """Set tags of a flow in one transaction, replacing their old values."""
        checked = check_tags(tags)
        if not checked:
            raise error("invalid_input", "tags: must contain at least one tag, e.g. {'app.customer': 'acme'}")
        await self._write(flow_id, checked)
        return TagsSet(count=len(checked))

    async def get_flow_tag(self, flow_id: UUID | str, key: str) -> str | None:
        """The value of one tag of a flow, or None if it is not set."""
        check_tag_key(key)
        partition, parsed = check_flow_id(self._store, flow_id)
        rows = await self._store.fetch(SQL.read_flow_tag, partition_key=partition, flow_id=parsed, key=key)
        return rows[0]["value"] if rows else None

    async def _write(self, flow_id: UUID | str, tags: Mapping[str, str]) -> None:
        partition, parsed = check_flow_id(self._store, flow_id)
        rows = await self._store.fetch(
            SQL.set_flow_tags, partition_key=partition, flow_id=parsed, keys=list(tags), values=list(tags.values())
        )
        if not rows:
            raise error("flow_not_found", str(parsed))
