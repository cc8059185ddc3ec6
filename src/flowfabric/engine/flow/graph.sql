-- name: insert_empty_flow
-- Creates an empty flow with its limits; no row if there is one with its id.
with clock as materialized (select ff_now() as now),
made as (
  insert into flow (partition_key, flow_id, namespace_no, flow_kind, retain_until, created_at, last_mutation_at)
  select :partition_key, :flow_id, :namespace_no, :flow_kind, c.now + :retention_ms::bigint, c.now, c.now from clock c
  on conflict (partition_key, flow_id) do nothing
  returning flow_id
),
limited as (
  insert into limit_attachment (scope_type, scope_id, limit_type, limit_id, attached_at)
  select 'flow', m.flow_id::text, l.limit_type, l.limit_id, c.now
    from made m cross join clock c cross join unnest(:limit_types::text[], :limit_ids::uuid[]) as l(limit_type, limit_id)
)
select flow_id from made;

-- name: lock_new_member
-- Locks an execution until the transaction ends, waiting for it.
select flow_id, terminal_outcome, lifecycle_phase, queue_no from execution
 where partition_key = :partition_key and execution_id = :execution_id
   for update;

-- name: read_left_edges
-- Whether a flow has edges of an execution that is not a member.
select exists (
         select from edge e
          where e.upstream_id = :execution_id and e.partition_key = any(array[:partition_key::smallint]) and e.flow_id = any(array[:flow_id::uuid]))
    or exists (
         select from edge e
          where e.downstream_id = :execution_id and e.partition_key = any(array[:partition_key]) and e.flow_id = any(array[:flow_id]))
       as has_edges;

-- name: add_member
-- Makes an execution that the transaction has locked a member of a locked flow; returns the number of members.
with clock as materialized (select ff_now() as now),
joined as (
  update execution e set flow_id = :flow_id, last_mutation_at = c.now
    from clock c
   where e.partition_key = :partition_key and e.execution_id = :execution_id
)
update flow f
   set node_count = f.node_count + 1, graph_revision = f.graph_revision + 1, last_mutation_at = c.now
  from clock c
 where f.partition_key = :partition_key and f.flow_id = :flow_id
returning f.node_count;

-- name: read_new_edge
-- What decides whether an edge may be staged in a locked flow: whether its ends are members, whether it would close a cycle, and the
-- edge that has its id. The walk begins at the downstream execution; it is skipped if nothing leads to the upstream one. `is not distinct from` keeps the
-- planner from reading all edges of the flow by its key.
with recursive reachable as (
  select :downstream_id::uuid as execution_id
   where exists (
         select from edge e
          where e.downstream_id = :upstream_id and e.partition_key is not distinct from :partition_key::smallint
            and e.flow_id is not distinct from :flow_id::uuid)
  union
  select e.downstream_id
    from reachable r
   cross join lateral (
         select e.downstream_id from edge e
          where e.upstream_id = r.execution_id and e.partition_key is not distinct from :partition_key
            and e.flow_id is not distinct from :flow_id
         offset 0) e
),
member as materialized (
  select e.execution_id from execution e
   where e.partition_key = :partition_key and e.execution_id = any(array[:upstream_id::uuid, :downstream_id])
     and e.flow_id is not distinct from :flow_id
)
select exists (select from member where execution_id = :upstream_id) as has_upstream,
       exists (select from member where execution_id = :downstream_id) as has_downstream,
       exists (select from reachable where execution_id = :upstream_id) as closes_cycle, o.*
  from (values (1)) as one(nth)
  left join lateral (
       select e.* from edge e
        where e.partition_key = :partition_key and e.flow_id = :flow_id and e.edge_id = :edge_id limit 1) o on true;

-- name: insert_edge
-- Stages an edge in a locked flow, and counts it in the group of its downstream execution; returns the new graph revision.
with clock as materialized (select ff_now() as now),
staged as (
  insert into edge (partition_key, flow_id, edge_id, edge_no, upstream_id, downstream_id, state, staged_at, dependency_kind,
                    data_passing_ref)
  select f.partition_key, f.flow_id, :edge_id, f.edge_count + 1, :upstream_id, :downstream_id, 'staged', c.now, :dependency_kind,
         :data_passing_ref
    from clock c
   cross join (select f.* from flow f where f.partition_key = :partition_key and f.flow_id = :flow_id) f
),
grouped as (
  insert into edge_group as g (partition_key, flow_id, downstream_id, staged_count, created_at)
  select :partition_key, :flow_id, :downstream_id, 1, c.now from clock c
  on conflict (partition_key, flow_id, downstream_id) do update set staged_count = g.staged_count + 1
)
update flow f
   set edge_count = f.edge_count + 1, graph_revision = f.graph_revision + 1, last_mutation_at = c.now
  from clock c
 where f.partition_key = :partition_key and f.flow_id = :flow_id
returning f.graph_revision;

-- name: read_group_policy
-- The policy of a group of a locked flow, and how many edges it has; no row without a group.
select policy, k, on_satisfied, staged_count from edge_group
 where partition_key = :partition_key and flow_id = :flow_id and downstream_id = :downstream_id;

-- name: set_group_policy
-- Stores the policy of a group without edges.
insert into edge_group (partition_key, flow_id, downstream_id, policy, k, on_satisfied, created_at)
values (:partition_key, :flow_id, :downstream_id, :policy, :k, :on_satisfied, ff_now())
on conflict (partition_key, flow_id, downstream_id) do update
   set policy = excluded.policy, k = excluded.k, on_satisfied = excluded.on_satisfied;

-- name: read_edge_to_apply
-- An edge of a locked flow, and the states of its upstream execution and of its downstream one, which the transaction has locked.
-- An absent execution has no state, nor has an upstream one that is no member: another execution with the id of a deleted member.
select e.edge_id, e.upstream_id, e.downstream_id, e.state, u.lifecycle_phase as upstream_phase, u.terminal_outcome as upstream_outcome,
       d.lifecycle_phase as downstream_phase, d.eligibility_state as downstream_eligibility, d.flow_id as downstream_flow_id
  from edge e
  left join lateral (
       select u.lifecycle_phase, u.terminal_outcome from execution u
        where u.partition_key = e.partition_key and u.execution_id = e.upstream_id and u.flow_id is not distinct from e.flow_id
        limit 1) u on true
  left join lateral (
       select d.lifecycle_phase, d.eligibility_state, d.flow_id from execution d
        where d.partition_key = e.partition_key and d.execution_id = e.downstream_id limit 1) d on true
 where e.partition_key = :partition_key and e.flow_id = :flow_id and e.edge_id = :edge_id;

-- name: apply_edge
-- Makes a staged edge of a locked flow count for its downstream execution, with the kind and the data reference that are given instead
-- of the staged ones; an empty reference is none. Returns how many of its edges are unresolved, and the state of the group.
with clock as materialized (select ff_now() as now),
applied as (
  update edge e
     set state = 'unsatisfied', applied_at = c.now, dependency_kind = coalesce(:dependency_kind, e.dependency_kind),
         data_passing_ref = nullif(coalesce(:data_passing_ref, e.data_passing_ref), '')
    from clock c
   where e.partition_key = :partition_key and e.flow_id = :flow_id and e.edge_id = :edge_id
)
update edge_group g
   set applied_count = g.applied_count + 1, last_flow_graph_revision = :graph_revision, last_dependency_update_at = c.now
  from clock c
 where g.partition_key = :partition_key and g.flow_id = :flow_id and g.downstream_id = :downstream_id
returning g.applied_count - g.succeeded_count - g.failed_count - g.skipped_count as unsatisfied_count, g.group_state;

-- name: block_by_dependencies
-- Makes a runnable execution that the transaction has locked wait for its dependencies: takes it from its queue with its grant and
-- stops the timer of its delay; the time of the delay stays. Returns the quota keys in which slots became free.
with clock as materialized (select ff_now() as now),
held as materialized (
  select e.partition_key, e.execution_id, e.eligibility_state, e.queue_no, e.place, e.attached,
         case when e.granted_until is not null then e.slot_keys end as slot_keys,
         (select q.route_no from queue q where q.queue_no = e.queue_no) as route_no
    from execution e
   where e.partition_key = :partition_key and e.execution_id = :execution_id
),
blocked as (
  update execution e
     set eligibility_state = :to_eligibility, blocking_reason = :to_blocking, blocking_detail = :detail, granted_until = null,
         attached = e.attached & ~9, slot_keys = null,
         last_transition_at = case when h.eligibility_state = :to_eligibility then e.last_transition_at else c.now end,
         last_mutation_at = case when h.eligibility_state = :to_eligibility then c.now end
    from held h cross join clock c
   where e.partition_key = any(array[h.partition_key]) and e.execution_id = h.execution_id
),
-- The slots of the grant.
returned_slots as (
  insert into slot_return as s (quota_key_no, shard, returned)
  select k.quota_key_no, :slot_shard::smallint, count(*)
    from held h cross join lateral unnest(h.slot_keys) as k(quota_key_no)
   where h.slot_keys is not null
   group by k.quota_key_no
   order by k.quota_key_no
  on conflict (quota_key_no, shard) do update set returned = s.returned + excluded.returned
  returning s.quota_key_no
),
taken as (
  delete from ready r using held h
   where h.eligibility_state in ('eligible_now', 'blocked_by_budget', 'blocked_by_quota')
     and r.route_no = any(array[h.route_no]) and r.queue_no = any(array[h.queue_no]) and r.place = h.place
),
grants as (
  delete from claim_grant g using held h
   where h.attached & 1 <> 0 and g.partition_key = any(array[h.partition_key]) and g.execution_id = h.execution_id
),
-- The kind is compared as text: with a plain equality, a plan made while the table is small would scan all of timer_due.
untimed as (
  delete from timer t using held h
   where h.eligibility_state = 'not_eligible_until_time'
     and t.partition_key = any(array[h.partition_key]) and t.execution_id = h.execution_id and t.kind::text = 'delay'
),
listings as (
  insert into listed (partition_key, execution_id, public_state, at)
  select h.partition_key, h.execution_id, 'waiting_children', c.now
    from held h cross join clock c
   where h.eligibility_state <> :to_eligibility
  on conflict (partition_key, execution_id) do update set public_state = excluded.public_state, at = excluded.at
)
select quota_key_no from returned_slots;
