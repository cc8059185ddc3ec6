-- name: read_flow_record
-- One flow with its tags, and the groups that have edges, by their downstream execution.
select f.flow_kind, n.namespace, f.public_flow_state, f.derived_state, f.graph_revision, f.node_count, f.edge_count, f.created_at,
       f.last_mutation_at, f.cancelled_at, f.cancel_reason, f.cancellation_policy,
       (select jsonb_object_agg(t.key, t.value) from flow_tag t
         where t.partition_key = f.partition_key and t.flow_id = f.flow_id) as tags,
       (select jsonb_agg(jsonb_build_array(g.downstream_id, g.policy, g.k, g.on_satisfied, g.staged_count, g.succeeded_count,
                                           g.failed_count, g.skipped_count, g.group_state) order by g.downstream_id)
          from edge_group g
         where g.partition_key = f.partition_key and g.flow_id = f.flow_id and g.staged_count > 0) as edge_groups
  from flow f
  left join lateral (select n.namespace from namespace n where n.namespace_no = f.namespace_no limit 1) n on true
 where f.partition_key = :partition_key and f.flow_id = :flow_id;

-- name: read_edge
-- One edge of a flow.
select e.* from edge e where e.partition_key = :partition_key and e.flow_id = :flow_id and e.edge_id = :edge_id;

-- name: list_outgoing_edges
-- The edges of a flow that leave an execution. `is not distinct from` leaves only the index of upstream executions.
select e.* from edge e
 where e.upstream_id = :execution_id and e.partition_key is not distinct from :partition_key::smallint
   and e.flow_id is not distinct from :flow_id::uuid
 order by e.edge_id;

-- name: list_incoming_edges
-- The edges of a flow that lead to an execution. `is not distinct from` leaves only the index of downstream executions.
select e.* from edge e
 where e.downstream_id = :execution_id and e.partition_key is not distinct from :partition_key::smallint
   and e.flow_id is not distinct from :flow_id::uuid
 order by e.edge_id;

-- name: read_dependencies
-- The state of an execution, and of the group of its applied inbound edges, null without any.
select e.lifecycle_phase, e.ownership_state, e.terminal_outcome, g.group_state
  from execution e
  left join lateral (
       select g.group_state from edge_group g
        where g.partition_key = e.partition_key and g.flow_id = e.flow_id and g.downstream_id = e.execution_id and g.applied_count > 0
        limit 1) g on true
 where e.partition_key = :partition_key and e.execution_id = :execution_id;
