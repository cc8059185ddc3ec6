-- name: read_submitted_flow
-- Whether a flow was created by the submission that minted this execution or this edge; no row if the flow does not exist.
-- The execution is found by its key, not by its flow.
select ff_confirm() as is_confirmed,
       coalesce((select e.flow_id from execution e
                  where e.partition_key = :partition_key::smallint and e.execution_id = :minted_execution_id::uuid) = f.flow_id, false)
       or exists (select from edge x
                   where x.partition_key = f.partition_key and x.flow_id = f.flow_id and x.edge_id = :minted_edge_id::uuid) as is_ours
  from flow f
 where f.partition_key = :partition_key and f.flow_id = :flow_id;

-- name: list_existing_members
-- Those of the given executions that exist.
select e.execution_id
  from unnest(:execution_ids::uuid[]) as i(execution_id)
 cross join lateral (
       select e.execution_id from execution e where e.partition_key = :partition_key and e.execution_id = i.execution_id limit 1) e;

-- fragment: part
-- Creates members, applied edges and groups of a new flow at the time in began, or nothing if it is empty. Members are created in input
-- order: those without inbound edges as submissions that start at once or delayed, the others waiting for their dependencies.
given as (
  select execution_id,
         coalesce(queue_no, (:queue_nos)[1]) as queue_no, coalesce(route_no, (:route_nos)[1]) as route_no,
         coalesce(lane_no, (:lane_nos)[1]) as lane_no, coalesce(priority, (:priorities)[1]) as priority,
         coalesce(input_payload, (:input_payloads)[1]) as input_payload,
         coalesce(creator_identity, (:creator_identities)[1]) as creator_identity,
         case cardinality(:payload_encodings) when 1 then (:payload_encodings)[1] else payload_encoding end as payload_encoding,
         case cardinality(:policies) when 1 then (:policies)[1] else policy end as policy,
         coalesce(
           case cardinality(:delays_until) when 1 then (:delays_until)[1] else delay_until end,
           (select now from began) + case cardinality(:delays_ms) when 1 then (:delays_ms)[1] else delay_ms end) as delay_until,
         coalesce(
           case cardinality(:deadlines_at) when 1 then (:deadlines_at)[1] else deadline_at end,
           (select now from began) + case cardinality(:deadlines_ms) when 1 then (:deadlines_ms)[1] else deadline_ms end) as deadline_at,
         case cardinality(:retentions_ms) when 1 then (:retentions_ms)[1] else retention_ms end as retention_ms,
         case cardinality(:quota_weights) when 1 then (:quota_weights)[1] else quota_weight end as quota_weight,
         case cardinality(:instance_tags) when 1 then (:instance_tags)[1] else instance_tag end as instance_tag,
         case cardinality(:tags) when 1 then (:tags)[1] else tags end as tags,
         coalesce(inbound, (:inbound_counts)[1]) as inbound
    from unnest(:execution_ids::uuid[], :queue_nos::int[], :route_nos::int[], :lane_nos::int[], :priorities::smallint[],
                :input_payloads::bytea[], :payload_encodings::text[], :creator_identities::text[], :policies::text[],
                :delays_until::bigint[], :delays_ms::bigint[], :deadlines_at::bigint[], :deadlines_ms::bigint[],
                :retentions_ms::bigint[], :quota_weights::bigint[], :instance_tags::text[], :tags::text[], :inbound_counts::int[])
         as i(execution_id, queue_no, route_no, lane_no, priority, input_payload, payload_encoding, creator_identity, policy,
              delay_until, delay_ms, deadline_at, deadline_ms, retention_ms, quota_weight, instance_tag, tags, inbound)
),
item as materialized (
  select i.*, c.now, i.inbound > 0 as is_blocked, coalesce(i.delay_until > c.now, false) as is_delayed,
         i.inbound = 0 and coalesce(i.delay_until <= c.now, true) as is_claimable,
         ((9000 - i.priority)::bigint << 48) | nextval('execution_sequence') as place
    from given i cross join began c
),
fresh as (
  insert into execution (partition_key, execution_id, flow_id, place, queue_no, namespace_no, lane_no, has_tags, lifecycle_phase,
                         eligibility_state, blocking_reason, attempt_state, delay_until, deadline_at, created_at,
                         last_transition_at, instance_tag, retention_ms, blocking_detail, creator_identity, input_payload,
                         payload_encoding, policy, quota_weight)
  select :partition_key::smallint, execution_id, :flow_id::uuid, place, queue_no, :namespace_no::int, lane_no, tags is not null, 'runnable',
         (case when is_blocked then 'blocked_by_dependencies' when is_delayed then 'not_eligible_until_time'
               else 'eligible_now' end)::eligibility_state,
         (case when is_blocked then 'waiting_for_children' when is_delayed then 'waiting_for_delay'
               else 'waiting_for_worker' end)::blocking_reason,
         'pending_first_attempt', case when is_delayed then delay_until end, deadline_at, now, now, instance_tag, retention_ms,
         case when is_blocked then inbound || ' dep(s) unresolved' when is_delayed then 'delayed until ' || delay_until end,
         creator_identity, case when octet_length(input_payload) <= :inline_payload_bytes then input_payload end, payload_encoding,
         policy::jsonb, quota_weight
    from item
),
queued as (
  insert into ready (place, route_no, queue_no, partition_key, execution_id)
  select place, route_no, queue_no, :partition_key, execution_id from item where is_claimable
),
blocked as (
  insert into listed (partition_key, execution_id, public_state, at)
  select :partition_key, execution_id, 'waiting_children', now from item where is_blocked
),
large as (
  insert into execution_input (partition_key, execution_id, input_payload)
  select :partition_key, execution_id, input_payload from item
   where :has_large_inputs::boolean and octet_length(input_payload) > :inline_payload_bytes
),
timed as (
  insert into timer (partition_key, execution_id, kind, due_at)
  select :partition_key, execution_id, 'delay'::timer_kind, delay_until from item where is_delayed and not is_blocked
  union all
  select :partition_key, execution_id, 'deadline', greatest(deadline_at, now) from item where deadline_at is not null
),
tagged as (
  insert into execution_tag (partition_key, execution_id, key, value)
  select :partition_key, i.execution_id, t.key, t.value
    from item i cross join lateral jsonb_each_text(i.tags::jsonb) t
   where i.tags is not null
),
inserted_events as (
  insert into event (at, execution_id, partition_key, kind, namespace_no, flow_id, instance_tag, tags)
  select now, execution_id, :partition_key, 'tag_attached', :namespace_no, :flow_id, instance_tag, tags::jsonb
    from item where instance_tag is not null
),
inserted_edges as (
  insert into edge (partition_key, flow_id, edge_id, edge_no, upstream_id, downstream_id, state, staged_at, applied_at,
                    dependency_kind, data_passing_ref)
  select :partition_key, :flow_id, i.edge_id, :edges_before::int + i.nth, coalesce(i.upstream_id, (:upstream_ids)[1]),
         coalesce(i.downstream_id, (:downstream_ids)[1]), 'unsatisfied', c.now, c.now,
         coalesce(i.dependency_kind, (:dependency_kinds)[1]),
         case cardinality(:data_passing_refs) when 1 then (:data_passing_refs)[1] else i.data_passing_ref end
    from unnest(:edge_ids::uuid[], :upstream_ids::uuid[], :downstream_ids::uuid[], :dependency_kinds::text[],
                :data_passing_refs::text[]) with ordinality
         as i(edge_id, upstream_id, downstream_id, dependency_kind, data_passing_ref, nth)
   cross join began c
),
inserted_groups as (
  insert into edge_group (partition_key, flow_id, downstream_id, policy, k, on_satisfied, staged_count, applied_count, created_at,
                          last_dependency_update_at, last_flow_graph_revision)
  select :partition_key, :flow_id, i.group_id, coalesce(i.policy, (:group_policies)[1]),
         case cardinality(:ks) when 1 then (:ks)[1] else i.k end,
         case cardinality(:effects) when 1 then (:effects)[1] else i.effect end, coalesce(i.edge_count, (:group_edge_counts)[1]),
         coalesce(i.edge_count, (:group_edge_counts)[1]), c.now, c.now, :graph_revision::bigint
    from unnest(:group_ids::uuid[], :group_policies::text[], :ks::int[], :effects::text[], :group_edge_counts::int[])
         as i(group_id, policy, k, effect, edge_count)
   cross join began c
)

-- fragment: work
-- Where executions can be claimed, by priority, and when the first delay ends.
select lane_no, route_no, queue_no, min(place) as place, null::bigint as due_in_ms
  from item where is_claimable group by lane_no, route_no, queue_no, place >> 48
union all
select null, null, null, null, min(delay_until - now) from item where is_delayed and not is_blocked having count(*) > 0

-- name: insert_flow
-- Creates a flow, its tags, its limits and its first part, unless the flow exists or a lane refuses submissions. Returns which of them it is, and the
-- work of the part. Waits at most :lock_timeout for another transaction that is creating the flow.
with clock as materialized (select ff_now() as now, set_config('lock_timeout', :lock_timeout, true)),
refusing as materialized (
  select i.lane_no, l.state
    from unnest(:flow_lane_nos::int[]) with ordinality as i(lane_no, nth)
   cross join lateral (select l.state from lane l where l.lane_no = i.lane_no limit 1) l
   where l.state in ('draining', 'disabled')
   order by i.nth limit 1
),
new_flow as (
  insert into flow (partition_key, flow_id, namespace_no, flow_kind, graph_revision, node_count, edge_count, derived_state,
                    live_count, project_at, retain_until, created_at, last_mutation_at)
  select :partition_key::smallint, :flow_id::uuid, :namespace_no::int, :flow_kind::text, :node_count::int + :edge_count::int,
         :node_count, :edge_count,
         case when :edge_count > 0 or :latest_delay_until::bigint > now or :longest_delay_ms::bigint > 0 then 'blocked' else 'open' end,
         :node_count, case when :node_count > 0 then now end, now + :retention_ms::bigint, now, now
    from clock
   where not exists (select from refusing)
  on conflict (partition_key, flow_id) do nothing
  returning partition_key, flow_id
),
flow_tagged as (
  insert into flow_tag (partition_key, flow_id, key, value)
  select f.partition_key, f.flow_id, t.key, t.value
    from new_flow f cross join unnest(:tag_keys::text[], :tag_values::text[]) as t(key, value)
),
limited as (
  insert into limit_attachment (scope_type, scope_id, limit_type, limit_id, attached_at)
  select 'flow', f.flow_id::text, l.limit_type, l.limit_id, c.now
    from new_flow f cross join clock c cross join unnest(:limit_types::text[], :limit_ids::uuid[]) as l(limit_type, limit_id)
),
began as materialized (select now from clock where exists (select from new_flow)),
-- include: part
select n.*, w.*
  from (select exists (select from new_flow) as is_new, (select lane_no from refusing) as refusing_lane_no,
               (select state from refusing) as refusing_lane_state) n
  left join (
-- include: work
) w on true;

-- name: insert_part
-- Creates another part of a flow that the transaction has created, and returns its work.
with began as materialized (select ff_now() as now),
-- include: part
-- include: work
;
