-- name: list_upstream_results
-- The edges from the given executions to a member of a flow, each with the state of the upstream execution; with its result if the
-- edge is satisfied and the upstream execution has succeeded. The partition is compared outside of inbound: there, a plan made while the
-- table is empty would scan a whole partition. `(... in (...)) is true` makes the planner use a hashed subplan instead of a nested loop.
with inbound as materialized (
  select x.partition_key, x.flow_id, x.edge_id, x.upstream_id, x.state, x.last_resolved_at
    from edge x where x.downstream_id = :execution_id::uuid
)
select x.edge_id, x.upstream_id, x.state::text as dependency_state, x.last_resolved_at, u.execution_kind, u.public_state, u.result_payload,
       u.result_encoding
  from inbound x
 cross join lateral (
       select k.execution_kind, u.public_state, u.result_encoding,
              case when x.state = 'satisfied' and u.terminal_outcome = 'success' then coalesce(u.result_payload, (
                select r.result_payload from execution_result r
                 where r.partition_key = u.partition_key and r.execution_id = u.execution_id)) end as result_payload
         from execution u
         left join queue q on q.queue_no = u.queue_no
         left join kind k on k.kind_no = q.kind_no
        where u.partition_key = x.partition_key and u.execution_id = x.upstream_id and u.flow_id is not distinct from x.flow_id limit 1) u
 where x.partition_key = :partition_key and (x.upstream_id in (select unnest(:upstream_ids::uuid[]))) is true;
