-- fragment: resolved
-- Resolves the edges in hop: of flows that the transaction has locked, to children that it has locked, each with the outcome of its
-- upstream execution (1 is success, 5 is skipped), in the order of nth. Each edge counts once. all_of, any_of and quorum differ only in
-- how many successes are needed. A group that is decided stays so, and later results only count.
counted as materialized (
  select d.*, g.policy, g.group_state, g.staged_count,
         g.succeeded_count + d.succeeded as succeeded_count, g.failed_count + d.failed as failed_count,
         g.skipped_count + d.skipped as skipped_count,
         g.satisfied_at, case g.policy when 'all_of' then g.staged_count when 'any_of' then 1 else g.k end as needed,
         g.policy <> 'all_of' and coalesce(g.on_satisfied, 'cancel_remaining') = 'cancel_remaining' as cancels_siblings
    from (select partition_key, flow_id, downstream_id, count(*) filter (where outcome = 1) as succeeded,
                 count(*) filter (where outcome between 2 and 4) as failed, count(*) filter (where outcome = 5) as skipped,
                 -- The edges of the child in their order: a join with hop would compare each edge with each.
                 array_agg(upstream_id order by nth) filter (where :has_data::boolean) as upstream_ids,
                 array_agg(outcome order by nth) filter (where :has_data) as outcomes,
                 array_agg(data_passing_ref is not null order by nth) filter (where :has_data) as pass_data
            from hop group by partition_key, flow_id, downstream_id) d
   cross join lateral (
         select g.* from edge_group g
          where g.partition_key = d.partition_key and g.flow_id = d.flow_id and g.downstream_id = d.downstream_id limit 1) g
),
-- After those that decided a group of this batch before, even in the same millisecond: the child may have read their results.
resolution as materialized (
  select greatest((select now from clock), max(satisfied_at) filter (where group_state = 'satisfied') + 1) as at from counted
),
set_edges as (
  update edge x
     set state = case when h.outcome = 1 then 'satisfied' else 'impossible' end::dependency_state, last_resolved_at = r.at
    from hop h cross join resolution r
   where x.partition_key = any(array[h.partition_key]) and x.flow_id = h.flow_id and x.edge_id = h.edge_id
),
judged as materialized (
  select c.*, c.group_state = 'pending' and c.to_state <> 'pending' as has_fired
    from (select c.*,
                 case
                   when c.group_state <> 'pending' then c.group_state
                   when c.succeeded_count >= c.needed then 'satisfied'
                   when c.failed_count + c.skipped_count > c.staged_count - c.needed then 'impossible'
                   else 'pending' end::group_state as to_state
            from counted c) c
),
set_groups as (
  update edge_group g
     set succeeded_count = j.succeeded_count, failed_count = j.failed_count, skipped_count = j.skipped_count, group_state = j.to_state,
         satisfied_at = case when j.has_fired and j.to_state = 'satisfied' then (select at from resolution) else g.satisfied_at end,
         last_dependency_update_at = (select now from clock),
         cancel_siblings_pending_flag = g.cancel_siblings_pending_flag or (j.has_fired and j.cancels_siblings),
         cancel_siblings_pending_members = case when j.has_fired and j.cancels_siblings then array(
           select x.upstream_id
             from edge x
            cross join lateral (
                  select e.lifecycle_phase from execution e
                   where e.partition_key = x.partition_key and e.execution_id = x.upstream_id and e.flow_id is not distinct from x.flow_id
                   limit 1) e
            where x.downstream_id = j.downstream_id and x.partition_key is not distinct from j.partition_key
              and x.flow_id is not distinct from j.flow_id and e.lifecycle_phase <> 'terminal')
           else g.cancel_siblings_pending_members end,
         cancel_siblings_reason = case when j.has_fired and j.cancels_siblings
           then case j.to_state when 'satisfied' then 'sibling_quorum_satisfied' else 'sibling_quorum_impossible' end
           else g.cancel_siblings_reason end
    from judged j
   where g.partition_key = any(array[j.partition_key]) and g.flow_id = j.flow_id and g.downstream_id = j.downstream_id
),
queued_siblings as (
  insert into pending_cancel_group (partition_key, flow_id, downstream_id, enqueued_at)
  select partition_key, flow_id, downstream_id, (select now from clock) from judged where has_fired and cancels_siblings
  on conflict (partition_key, flow_id, downstream_id) do nothing
  returning 1
),
-- Children that a group decides, and those that get the result of an upstream execution as their input.
child as materialized (
  select j.partition_key, j.downstream_id as execution_id, j.has_fired, j.to_state, s.source_id, e.*
    from judged j
   cross join lateral (
         select e.lifecycle_phase, e.terminal_outcome, e.ownership_state, e.eligibility_state, e.blocking_reason, e.attempt_state,
                e.lease_epoch
           from execution e where e.partition_key = j.partition_key and e.execution_id = j.downstream_id limit 1) e
    left join lateral (
         -- Each edge copies as if it were resolved alone: under all_of every success before the first other result, of which the last one
         -- wins, and under any_of and quorum only the success that decides. After a replay, the kept successes may be enough, and the first
         -- edge decides.
         select h.upstream_id as source_id
           from (select h.*, count(*) filter (where h.outcome = 1) over (order by h.result_no) as success_no
                   from unnest(j.upstream_ids, j.outcomes, j.pass_data)
                        with ordinality as h(upstream_id, outcome, passes_data, result_no)) h
          cross join lateral (
                select u.result_payload is not null or exists (
                         select from execution_result r
                          where r.partition_key = j.partition_key and r.execution_id = h.upstream_id) as has_result
                  from execution u where u.partition_key = j.partition_key and u.execution_id = h.upstream_id limit 1) u
          where h.outcome = 1 and h.passes_data and u.has_result
            and case when j.policy = 'all_of' then h.success_no = h.result_no
                     when j.succeeded_count - j.succeeded >= j.needed then h.result_no = 1
                     else h.success_no = j.needed - (j.succeeded_count - j.succeeded) end
          order by h.result_no desc limit 1) s
      on j.group_state = 'pending' and (j.policy = 'all_of' or (j.has_fired and j.to_state = 'satisfied'))
   where e.terminal_outcome = 'none' and (j.has_fired or s.source_id is not null)
),
promotable as materialized (
  select partition_key, execution_id from child
   where has_fired and to_state = 'satisfied' and lifecycle_phase = 'runnable' and ownership_state = 'unowned'
     and eligibility_state = 'blocked_by_dependencies'
),
-- Not those that their cancelled flow holds back: they end cancelled, whatever happens first to their upstream executions.
skippable as materialized (
  select partition_key, execution_id, attempt_state in ('running_attempt', 'attempt_interrupted') as has_attempt,
         case when ownership_state = 'leased' then lease_epoch end as lost_epoch
    from child where has_fired and to_state = 'impossible' and blocking_reason <> 'paused_by_flow_cancel'
)

-- fragment: promoted
-- Makes the executions in promotable, which the transaction has locked, claimable, or delayed if their delay has not elapsed. Only a
-- delay before a retry is the backoff of one.
promoted as (
  update execution e
     set eligibility_state = case when e.delay_until > c.now then :delayed_eligibility else :to_eligibility end::eligibility_state,
         blocking_reason = case
           when e.delay_until > c.now then case e.attempt_state when 'pending_retry_attempt' then :backoff_blocking else :delayed_blocking end
           else :to_blocking end::blocking_reason,
         attempt_state = case e.attempt_state when 'none' then :first_attempt else e.attempt_state end,
         blocking_detail = case when e.delay_until > c.now then
           case e.attempt_state when 'pending_retry_attempt' then 'retry backoff until ' else 'delayed until ' end || e.delay_until end,
         delay_until = case when e.delay_until > c.now then e.delay_until end,
         last_transition_at = c.now, last_mutation_at = null
    from promotable p
   cross join clock c
   where e.partition_key = any(array[p.partition_key]) and e.execution_id = p.execution_id
  returning e.partition_key, e.execution_id, e.lane_no, e.queue_no, e.place, e.public_state, e.delay_until, c.now,
            (select q.route_no from queue q where q.queue_no = e.queue_no) as route_no
),
readied as (
  insert into ready (place, route_no, queue_no, partition_key, execution_id)
  select place, route_no, queue_no, partition_key, execution_id from promoted where delay_until is null
),
timed as (
  insert into timer (partition_key, execution_id, kind, due_at)
  select partition_key, execution_id, 'delay', delay_until from promoted where delay_until is not null
  on conflict (partition_key, execution_id, kind) do update set due_at = excluded.due_at
),
unlisted as (
  delete from listed l using promoted p
   where p.public_state <> 'resumable' and l.partition_key = any(array[p.partition_key]) and l.execution_id = p.execution_id
),
listings as (
  insert into listed (partition_key, execution_id, public_state, at)
  select partition_key, execution_id, public_state, now from promoted where public_state = 'resumable'
  on conflict (partition_key, execution_id) do update set public_state = excluded.public_state, at = excluded.at
),
work as materialized (
  select l.lane_id, p.route_no, p.queue_no, p.place, p.due_in_ms
    from (select lane_no, route_no, queue_no, place >> 48 as band, min(place) as place, min(delay_until - now) as due_in_ms
            from promoted group by lane_no, route_no, queue_no, place >> 48, delay_until is null) p
    join lane l using (lane_no)
)

-- fragment: woken
-- Where promoted executions can be claimed, the best place of each queue and priority, and when the first delay ends.
(select array_agg(lane_id) from work where due_in_ms is null) as work_lanes,
(select array_agg(route_no) from work where due_in_ms is null) as work_routes,
(select array_agg(queue_no) from work where due_in_ms is null) as work_queues,
(select array_agg(place) from work where due_in_ms is null) as work_places,
(select min(due_in_ms) from work) as due_in_ms

-- fragment: decided
-- What the caller does next: end the skipped children, copy results, wake the sibling dispatcher.
(select count(*) from hop) as resolved,
(select count(*) from promoted) as promoted,
(select array_agg(partition_key) from skippable) as skip_partitions,
(select array_agg(execution_id) from skippable) as skip_ids,
(select array_agg(has_attempt) from skippable) as skip_has_attempt,
(select array_agg(lost_epoch) from skippable) as skip_epochs,
(select array_agg(partition_key) from child where source_id is not null) as copy_partitions,
(select array_agg(execution_id) from child where source_id is not null) as copy_ids,
(select array_agg(source_id) from child where source_id is not null) as copy_sources,
(select exists (select from queued_siblings)) as has_siblings

-- fragment: entries
-- The entries of the cascade in locked_entry, their executions in order (member), and the unsatisfied edges that leave them (out_edge),
-- one more than :edges at most. The first execution of an entry may have been settled up to after_edge_no.
entry as materialized (
  select c.*
    from locked_entry i
   cross join lateral (
         select c.* from cascade_entry c where c.partition_key = i.partition_key and c.event_id = i.event_id limit 1) c
   order by c.event_id
),
member as materialized (
  select e.event_id, e.partition_key, e.flow_id, e.outcome, m.execution_id, m.nth, row_number() over (order by e.event_id, m.nth) as rank,
         case when m.nth = 1 then e.after_edge_no end as after_edge_no, m.nth = 1 and e.has_left_edges as has_left_edges
    from entry e
   cross join lateral unnest(e.execution_ids) with ordinality as m(execution_id, nth)
   order by e.event_id, m.nth
),
out_edge as materialized (
  select m.event_id, m.rank, m.partition_key, m.flow_id, m.outcome, m.execution_id as upstream_id, x.edge_id, x.edge_no, x.downstream_id,
         x.data_passing_ref, row_number() over (order by m.rank, x.edge_no) as nth
    from member m
   cross join lateral (
         select x.edge_id, x.edge_no, x.downstream_id, x.data_passing_ref from edge x
          -- Not by equality: the planner would read all edges of the flow, by edge_pkey.
          where x.upstream_id = m.execution_id and x.partition_key is not distinct from m.partition_key
            and x.flow_id is not distinct from m.flow_id and x.state = 'unsatisfied' and x.edge_no > coalesce(m.after_edge_no, 0)
          order by x.edge_no limit :edges::int + 1) x
   limit :edges + 1
)

-- name: lock_entries
-- Locks the first of these entries, up to the one with which they have :edges executions, if they still exist, with their flows, and the
-- children of the next :edges edges that leave their executions, except what is locked elsewhere. Returns the locked entries, those that
-- are locked elsewhere, those behind the first ones, the children, whether an edge passes data, and how many edges can be settled at once:
-- the results that they pass have at most :bytes together, unless a single one has more. Edges that appear meanwhile have a child that is
-- not locked, so settle_entries leaves them. Flows and children that do not exist count as locked: nothing can be done for them, so they
-- keep no entry. Entries of such flows are returned too. The offsets keep the planner from reading the whole table for a lookup.
with given as materialized (
  select i.partition_key, i.event_id, sum(x.executions) over (order by i.nth) - x.executions < :edges as is_first
    from unnest(:entry_partitions::smallint[], :event_ids::bigint[]) with ordinality as i(partition_key, event_id, nth)
   cross join lateral (
         select cardinality(x.execution_ids) as executions from cascade_entry x
          where x.partition_key = i.partition_key and x.event_id = i.event_id limit 1) x
),
found as materialized (
  select i.partition_key, i.event_id, f.flow_id is null as is_without_flow, f.flow_id is not null or (
           c.flow_id is not null
           and not exists (select from flow f where f.partition_key = c.partition_key and f.flow_id = c.flow_id offset 0)) as is_locked
    from given i
    left join lateral (
         select c.partition_key, c.flow_id from cascade_entry c
          where c.partition_key = i.partition_key and c.event_id = i.event_id for update skip locked) c on true
    left join lateral (
         select f.flow_id from flow f where f.partition_key = c.partition_key and f.flow_id = c.flow_id for update skip locked) f on true
   where i.is_first
),
locked_entry as materialized (select partition_key, event_id from found where is_locked),
-- include: entries
,
locked_child as materialized (
  select d.downstream_id as execution_id
    from (select distinct o.partition_key, o.downstream_id from out_edge o where o.nth <= :edges order by o.partition_key, o.downstream_id) d
    left join lateral (
         select e.execution_id from execution e
          where e.partition_key = d.partition_key and e.execution_id = d.downstream_id for update skip locked) e on true
   where e.execution_id is not null
      or not exists (select from execution e where e.partition_key = d.partition_key and e.execution_id = d.downstream_id offset 0)
)
select (select array_agg(partition_key) from locked_entry) as entry_partitions,
       (select array_agg(event_id) from locked_entry) as event_ids,
       (select array_agg(partition_key) from found where not is_locked) as left_partitions,
       (select array_agg(event_id) from found where not is_locked) as left_event_ids,
       (select array_agg(partition_key) from given where not is_first) as rest_partitions,
       (select array_agg(event_id) from given where not is_first) as rest_event_ids,
       (select array_agg(event_id) from found where is_locked and is_without_flow) as event_ids_without_flow,
       (select array_agg(execution_id) from locked_child) as children,
       coalesce((select bool_or(data_passing_ref is not null) from out_edge), false) as has_data,
       least(:edges, (
         select greatest(min(p.nth) - 1, 1)
           from (select o.nth, sum(r.bytes) over (order by o.nth) as bytes
                   from out_edge o
                  cross join lateral (
                        select octet_length(coalesce(u.result_payload, (
                                 select r.result_payload from execution_result r
                                  where r.partition_key = u.partition_key and r.execution_id = u.execution_id))) as bytes
                          from execution u where u.partition_key = o.partition_key and u.execution_id = o.upstream_id limit 1) r
                  where o.outcome = 1 and o.data_passing_ref is not null) p
          where p.bytes > :bytes having count(*) > 0)) as edges;

-- name: settle_entries
-- Settles locked entries: resolves the next :edges edges of their executions whose children are locked (:children), and deletes the
-- entries, or removes from them the executions that have no unsatisfied edge left. Returns what the caller does next, how many
-- executions of each flow are settled, and the entries that are left.
with clock as materialized (select ff_now() as now),
locked_entry as materialized (
  select * from unnest(:entry_partitions::smallint[], :event_ids::bigint[]) as i(partition_key, event_id)
),
-- include: entries
,
located as materialized (
  select o.*, o.nth <= :edges as is_taken, o.downstream_id in (select unnest(:children::uuid[])) as is_locked from out_edge o
),
hop as materialized (select * from located where is_taken and is_locked),
-- include: resolved
,
-- include: promoted
,
-- The execution at which :edges were reached: it and those behind it are left.
cut as materialized (
  select min(rank) filter (where not is_taken) as rank,
         (array_agg(edge_no order by nth desc) filter (where is_taken))[1] as last_edge_no
    from located
),
left_member as materialized (
  select m.*
    from (select m.*, (m.rank in (select rank from located where is_taken and not is_locked)) is true as is_left from member m offset 0) m
   where m.is_left or m.rank >= (select rank from cut)
         -- A second pass for the edges that were left in the first.
      or (m.has_left_edges and m.after_edge_no is not null)
),
left_entry as materialized (
  select partition_key, event_id, array_agg(execution_id order by rank) as execution_ids, min(rank) as rank
    from left_member group by partition_key, event_id
),
set_entries as (
  update cascade_entry c
     set execution_ids = l.execution_ids,
         after_edge_no = case when l.rank = t.rank then
           case when exists (select from located o where o.rank = l.rank and o.is_taken) then t.last_edge_no else m.after_edge_no end end,
         has_left_edges = coalesce(l.rank = t.rank, false) and (m.is_left or m.has_left_edges)
    from left_entry l
   cross join cut t
    join left_member m on m.rank = l.rank
   where c.partition_key = any(array[l.partition_key]) and c.event_id = l.event_id
),
deleted_entries as (
  delete from cascade_entry c using entry e
   where c.partition_key = any(array[e.partition_key]) and c.event_id = e.event_id
     and e.event_id not in (select event_id from left_entry)
),
flow_count as materialized (
  select m.partition_key, m.flow_id, count(*) as ended, count(*) filter (where m.outcome between 2 and 4) as failed
    from member m
   where m.rank not in (select rank from left_member)
   group by m.partition_key, m.flow_id
)
select
-- include: decided
,
-- include: woken
,
(select array_agg(partition_key) from flow_count) as flow_partitions,
(select array_agg(flow_id) from flow_count) as flow_ids,
(select array_agg(ended) from flow_count) as flow_ended,
(select array_agg(failed) from flow_count) as flow_failed,
(select array_agg(e.partition_key order by e.event_id) from entry e join left_entry l using (event_id)) as left_partitions,
(select array_agg(event_id order by event_id) from left_entry) as left_event_ids,
(select rank is not null from cut) as is_cut;

-- name: lock_children_of_edges
-- Locks the children of edges of a locked flow, waiting for them; returns for each unsatisfied edge its child.
select x.edge_id, x.downstream_id, x.data_passing_ref is not null as has_data
  from (select x.edge_id, x.partition_key, x.downstream_id, x.data_passing_ref
          from unnest(:edge_ids::uuid[]) as i(edge_id)
         cross join lateral (
               select x.* from edge x
                where x.partition_key = :partition_key and x.flow_id = :flow_id and x.edge_id = i.edge_id and x.state = 'unsatisfied' limit 1) x
         order by x.downstream_id) x
 cross join lateral (
       select e.execution_id from execution e
        where e.partition_key = x.partition_key and e.execution_id = x.downstream_id for update) e;

-- name: resolve_edges
-- Resolves unsatisfied edges of a locked flow, with locked children, by the outcomes given, in this order. Returns what the caller does
-- next, and the group of each edge.
with clock as materialized (select ff_now() as now),
hop as materialized (
  select i.nth, i.outcome, x.*
    from unnest(:edge_ids::uuid[], :outcomes::smallint[]) with ordinality as i(edge_id, outcome, nth)
   cross join lateral (
         select x.partition_key, x.flow_id, x.edge_id, x.upstream_id, x.downstream_id, x.data_passing_ref from edge x
          where x.partition_key = :partition_key and x.flow_id = :flow_id and x.edge_id = i.edge_id and x.state = 'unsatisfied' limit 1) x
),
-- include: resolved
,
-- include: promoted
select
-- include: decided
,
-- include: woken
,
(select array_agg(j.policy = 'all_of' order by h.nth) from hop h join judged j using (partition_key, flow_id, downstream_id)) as are_all_of,
(select array_agg(j.group_state::text order by h.nth) from hop h join judged j using (partition_key, flow_id, downstream_id)) as groups_before,
(select array_agg(j.to_state::text order by h.nth) from hop h join judged j using (partition_key, flow_id, downstream_id)) as groups_after;

-- name: promote_blocked
-- Makes executions that the transaction has locked and that wait for dependencies claimable.
with clock as materialized (select ff_now() as now),
promotable as materialized (
  select e.partition_key, e.execution_id
    from unnest(:partition_keys::smallint[], :execution_ids::uuid[]) as i(partition_key, execution_id)
   cross join lateral (
         select e.partition_key, e.execution_id from execution e
          where e.partition_key = i.partition_key and e.execution_id = i.execution_id and e.lifecycle_phase = 'runnable'
            and e.ownership_state = 'unowned' and e.eligibility_state = 'blocked_by_dependencies' limit 1) e
),
-- include: promoted
select (select array_agg(partition_key) from promoted) as promoted_partitions, (select array_agg(execution_id) from promoted) as promoted_ids,
       (select array_agg(public_state) from promoted) as promoted_states,
-- include: woken
;

-- name: copy_results
-- Copies the results of upstream executions into the inputs of executions that the transaction has locked.
with item as materialized (
  select i.partition_key, i.execution_id, u.payload, u.result_encoding
    from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :source_ids::uuid[]) as i(partition_key, execution_id, source_id)
   cross join lateral (
         select coalesce(u.result_payload, (
                  select r.result_payload from execution_result r
                   where r.partition_key = u.partition_key and r.execution_id = u.execution_id)) as payload, u.result_encoding
           from execution u where u.partition_key = i.partition_key and u.execution_id = i.source_id limit 1) u
   where u.payload is not null
),
set_inputs as (
  update execution e
     set input_payload = case when octet_length(i.payload) <= :inline_payload_bytes::int then i.payload end, payload_encoding = i.result_encoding
    from item i
   where e.partition_key = any(array[i.partition_key]) and e.execution_id = i.execution_id
),
set_large as (
  insert into execution_input (partition_key, execution_id, input_payload)
  select partition_key, execution_id, payload from item where octet_length(payload) > :inline_payload_bytes
  on conflict (partition_key, execution_id) do update set input_payload = excluded.input_payload
),
deleted_large as (
  delete from execution_input l using item i
   where octet_length(i.payload) <= :inline_payload_bytes and l.partition_key = any(array[i.partition_key]) and l.execution_id = i.execution_id
)
select count(*) as copied from item;
