"""Flows whose rows a test writes itself, to reach states without the operations that build graphs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import asyncpg

from engine.state import block
from fixtures import Given, Rows, uuid_of
from flowfabric.engine.core.consequence import LeaseEnd, LeaseEnds
from flowfabric.engine.core.transition import Move
from flowfabric.engine.parts import parts_of
from flowfabric.model.ids import ExecutionId, split_execution_id


@dataclass
class PlantedFlow:
    """A flow and its members, which are ordinary executions of one lane."""

    given: Given
    connection: asyncpg.Connection
    flow_id: UUID = field(default_factory=uuid4)
    partition_key: int = -1

    async def plant(self, *members: ExecutionId) -> None:
        """Insert the flow with these members, none of which has ended."""
        self.partition_key, _ = split_execution_id(members[0])
        await self.connection.execute(
            """insert into flow (partition_key, flow_id, namespace_no, flow_kind, node_count, live_count, created_at, last_mutation_at)
               select $1, $2, namespace_no, 'test', $3, $3, ff_now(), ff_now() from namespace where namespace = 'tests'""",
            self.partition_key,
            self.flow_id,
            len(members),
        )
        await self.connection.execute(
            "update execution set flow_id = $1 where execution_id = any($2::uuid[])",
            self.flow_id,
            [uuid_of(member) for member in members],
        )

    async def block(self, child: ExecutionId, *upstreams: ExecutionId, policy: str = "all_of", k: int | None = None) -> None:
        """Let a waiting member wait for others."""
        await block(self.connection, child, "blocked_by_dependencies", "waiting_for_children")
        for upstream in upstreams:
            await self.connection.execute(
                """insert into edge (partition_key, flow_id, edge_id, upstream_id, downstream_id, state, staged_at, applied_at,
                                     dependency_kind)
                   values ($1, $2, $3, $4, $5, 'unsatisfied', ff_now(), ff_now(), 'success_only')""",
                self.partition_key,
                self.flow_id,
                uuid4(),
                uuid_of(upstream),
                uuid_of(child),
            )
        await self.connection.execute(
            """insert into edge_group (partition_key, flow_id, downstream_id, policy, k, staged_count, applied_count, created_at)
               values ($1, $2, $3, $4, $5, $6, $6, ff_now())""",
            self.partition_key,
            self.flow_id,
            uuid_of(child),
            policy,
            k,
            len(upstreams),
        )

    async def skip(self, child: ExecutionId) -> None:
        """Skip a member that waits, as the cascade does."""
        lease_ends = parts_of(self.given.engine).services[LeaseEnds]
        end = LeaseEnd(child, Move.SKIPPED_UNATTEMPTED, reason="dependency_impossible")
        assert (await lease_ends.one(end)).is_done

    async def resolve(self, child: ExecutionId, **states: Sequence[ExecutionId]) -> None:
        """Store how the edges from some upstreams were resolved, and what that means for the group: `satisfied`, `impossible`."""
        for state, upstreams in states.items():
            await self.connection.execute(
                """update edge set state = $1, last_resolved_at = ff_now()
                    where downstream_id = $2 and upstream_id = any($3::uuid[])""",
                state,
                uuid_of(child),
                [uuid_of(upstream) for upstream in upstreams],
            )
        await self.connection.execute(
            """update edge_group g set succeeded_count = c.succeeded, failed_count = c.failed,
                      group_state = (case when c.failed > 0 then 'impossible' when c.succeeded = g.applied_count then 'satisfied'
                                     else 'pending' end)::group_state
                 from (select count(*) filter (where state = 'satisfied') as succeeded,
                              count(*) filter (where state = 'impossible') as failed
                         from edge where downstream_id = $1) c
                where g.downstream_id = $1""",
            uuid_of(child),
        )

    async def row(self, rows: Rows) -> dict[str, Any]:
        """The row of the flow."""
        (row,) = await rows.of("flow", flow_id=self.flow_id)
        return row

    async def group(self, rows: Rows, child: ExecutionId) -> dict[str, Any]:
        """The group of a member's dependencies."""
        (row,) = await rows.of("edge_group", downstream_id=uuid_of(child))
        return row

    async def edge_states(self, rows: Rows, child: ExecutionId) -> dict[str, tuple[str, bool]]:
        """The state of each edge to a member, and whether it has a time of its resolution, by upstream."""
        found = await rows.of("edge", downstream_id=uuid_of(child))
        return {str(row["upstream_id"]): (row["state"], row["last_resolved_at"] is not None) for row in found}

    async def settle(self) -> None:
        """Settle the ends of members that no edge leaves."""
        await self.connection.execute(
            """with gone as (delete from cascade_entry where flow_id = $1 returning outcome, execution_ids)
               update flow f set live_count = live_count - g.ended, unhappy_count = unhappy_count + g.unhappy,
                      derived_state = case when live_count - g.ended > 0 then derived_state
                                           when unhappy_count + g.unhappy > 0 then 'failed' else 'completed' end
                 from (select count(*) as ended, count(*) filter (where outcome between 2 and 4) as unhappy
                         from gone, unnest(execution_ids)) g
                where f.flow_id = $1""",
            self.flow_id,
        )
