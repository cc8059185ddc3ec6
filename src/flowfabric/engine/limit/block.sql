-- name: read_held
-- Why an execution that the transaction has locked is blocked.
select blocking_reason from execution where partition_key = :partition_key and execution_id = :execution_id;

-- name: block_locked
-- Blocks a runnable execution that the transaction has locked, and deletes its grant and the timer of its delay; the time of the delay
-- stays. If a limit blocks it, it keeps its entry of ready. Returns the quota keys in which slots became free.
with clock as materialized (select ff_now() as now),
held as materialized (
  select e.partition_key, e.execution_id, e.eligibility_state, e.blocking_reason, e.queue_no, e.place, e.attached,
         case when e.granted_until is not null then e.slot_keys end as slot_keys,
         e.eligibility_state = :to_eligibility::eligibility_state as is_same,
         (select q.route_no from queue q where q.queue_no = e.queue_no) as route_no
    from execution e
   where e.partition_key = :partition_key and e.execution_id = :execution_id
),
blocked as (
  update execution e
     set eligibility_state = :to_eligibility, blocking_reason = :to_blocking, blocking_detail = :detail, granted_until = null,
         attached = e.attached & ~9, slot_keys = null,
         last_transition_at = case when h.is_same then e.last_transition_at else c.now end,
         last_mutation_at = case when h.is_same then c.now end
    from held h cross join clock c
   where e.partition_key = any(array[h.partition_key]) and e.execution_id = h.execution_id
  returning e.partition_key, e.execution_id, e.public_state
),
returned_slots as (
  insert into slot_return as s (quota_key_no, shard, returned)
  select k.quota_key_no, :slot_shard::smallint, 1
    from held h cross join lateral unnest(h.slot_keys) as k(quota_key_no)
   order by k.quota_key_no
  on conflict (quota_key_no, shard) do update set returned = s.returned + excluded.returned
  returning s.quota_key_no
),
deleted_entries as (
  delete from ready r using held h
   where not :keeps_entry::boolean
     and r.route_no = any(array[h.route_no]) and r.queue_no = any(array[h.queue_no]) and r.place = h.place
),
-- The entry stays, without the grant.
ungranted_entries as (
  update ready r set granted_until = null
    from held h
   where :keeps_entry and h.attached & 1 <> 0
     and r.route_no = any(array[h.route_no]) and r.queue_no = any(array[h.queue_no]) and r.place = h.place
),
deleted_grants as (
  delete from claim_grant g using held h
   where h.attached & 1 <> 0 and g.partition_key = any(array[h.partition_key]) and g.execution_id = h.execution_id
),
-- The kind is compared as text: with a plain equality, a plan made while the table is small would scan all of timer_due.
deleted_delays as (
  delete from timer t using held h
   where h.eligibility_state = 'not_eligible_until_time'
     and t.partition_key = any(array[h.partition_key]) and t.execution_id = h.execution_id and t.kind::text = 'delay'
),
listings as (
  insert into listed (partition_key, execution_id, public_state, at)
  select b.partition_key, b.execution_id, b.public_state, c.now from blocked b cross join held h cross join clock c where not h.is_same
  on conflict (partition_key, execution_id) do update set public_state = excluded.public_state, at = excluded.at
)
select quota_key_no from returned_slots;

-- name: unblock_locked
-- Makes blocked executions that the transaction has locked claimable; delayed if their delay has not elapsed, and waiting for their
-- dependencies if these are not satisfied. Returns where they can be claimed, or how long they are still delayed.
with clock as materialized (select ff_now() as now),
held as materialized (
  select e.*, g.downstream_id is not null as has_dependencies, e.delay_until > c.now as is_delayed, c.now
    from unnest(:partition_keys::smallint[], :execution_ids::uuid[]) as i(partition_key, execution_id)
   cross join clock c
   cross join lateral (
         select e.partition_key, e.execution_id, e.flow_id, e.delay_until from execution e
          where e.partition_key = i.partition_key and e.execution_id = i.execution_id limit 1) e
    left join lateral (
         select g.downstream_id from edge_group g
          where g.partition_key = e.partition_key and g.flow_id = e.flow_id and g.downstream_id = e.execution_id
            and g.group_state = 'pending' and g.applied_count > g.succeeded_count + g.failed_count + g.skipped_count limit 1) g on true
),
unblocked as (
  update execution e
     set eligibility_state = case
           when h.has_dependencies then :dependent_eligibility
           when h.is_delayed then :delayed_eligibility
           else :to_eligibility end::eligibility_state,
         blocking_reason = case
           when h.has_dependencies then :dependent_blocking
           when h.is_delayed then case e.attempt_state when 'pending_retry_attempt' then :backoff_blocking else :delayed_blocking end
           else :to_blocking end::blocking_reason,
         blocking_detail = case when h.is_delayed and not h.has_dependencies then
           case e.attempt_state when 'pending_retry_attempt' then 'retry backoff until ' else 'delayed until ' end || e.delay_until end,
         delay_until = case when h.is_delayed then e.delay_until end, last_transition_at = h.now, last_mutation_at = null
    from held h
   where e.partition_key = any(array[h.partition_key]) and e.execution_id = h.execution_id
  returning e.partition_key, e.execution_id, e.lane_no, e.queue_no, e.place, e.eligibility_state, e.public_state, e.delay_until, h.now,
            (select q.route_no from queue q where q.queue_no = e.queue_no) as route_no
),
-- An execution that a limit has blocked may have kept its entry; it loses it if it has to wait for something else.
inserted_entries as (
  insert into ready (place, route_no, queue_no, partition_key, execution_id)
  select place, route_no, queue_no, partition_key, execution_id from unblocked where eligibility_state = 'eligible_now'
  on conflict (queue_no, place) do nothing
),
deleted_entries as (
  delete from ready r using unblocked u
   where u.eligibility_state <> 'eligible_now'
     and r.route_no = any(array[u.route_no]) and r.queue_no = any(array[u.queue_no]) and r.place = u.place
),
inserted_delays as (
  insert into timer (partition_key, execution_id, kind, due_at)
  select partition_key, execution_id, 'delay'::timer_kind, delay_until from unblocked where eligibility_state = 'not_eligible_until_time'
  on conflict (partition_key, execution_id, kind) do update set due_at = excluded.due_at
),
written_listings as (
  insert into listed (partition_key, execution_id, public_state, at)
  select partition_key, execution_id, public_state, now from unblocked where public_state in ('resumable', 'waiting_children')
  on conflict (partition_key, execution_id) do update set public_state = excluded.public_state, at = excluded.at
),
deleted_listings as (
  delete from listed i using unblocked u
   where u.public_state not in ('resumable', 'waiting_children')
     and i.partition_key = any(array[u.partition_key]) and i.execution_id = u.execution_id
)
select case when u.eligibility_state = 'eligible_now' then l.lane_id end as lane_id, u.route_no, u.queue_no, u.place,
       case when u.eligibility_state = 'not_eligible_until_time' then u.delay_until - u.now end as delay_ms
  from unblocked u join lane l using (lane_no);

-- name: list_limited
-- The executions among the next :limit listed ones after a position that a limit blocks, the longest blocked first, with the limits of their
-- queues, and the last position read; null if there are no more.
with page as materialized (
  select i.at, i.partition_key, i.execution_id
    from listed i
   where i.public_state = 'rate_limited' and (i.at, i.execution_id) > (:since_at::bigint, :since_id::uuid)
   order by i.at, i.execution_id limit :limit
),
reached as materialized (select p.at, p.execution_id from page p order by p.at desc, p.execution_id desc limit 1)
select r.at as reached_at, r.execution_id as reached_id, (select count(*) from page) as seen, e.*
  from (values (true)) as one_row
  left join reached r on true
  left join lateral (
       select e.partition_key, e.execution_id, e.quota_weight, q.queue_no, q.quota_key_nos, q.budget_ids
         from page p
        cross join lateral (
              select e.partition_key, e.execution_id, e.quota_weight, e.queue_no from execution e
               where e.partition_key = p.partition_key and e.execution_id = p.execution_id
                 and e.eligibility_state in ('blocked_by_budget', 'blocked_by_quota') limit 1) e
        cross join lateral (select q.queue_no, q.quota_key_nos, q.budget_ids from queue q where q.queue_no = e.queue_no limit 1) q
        where p.execution_id <> all(:skipped::uuid[])
        order by p.at, p.execution_id) e on true;

-- name: list_spent_budgets
-- Those of the given budgets that have used up the hard limit of a dimension.
select i.budget_id
  from unnest(:partition_keys::smallint[], :budget_ids::uuid[]) as i(partition_key, budget_id)
 where exists (
       select from budget_limit l
        cross join lateral (
              select u.used from budget_usage u
               where u.partition_key = l.partition_key and u.budget_id = l.budget_id and u.dimension = l.dimension limit 1) u
        where l.partition_key = i.partition_key and l.budget_id = i.budget_id and l.hard_limit > 0 and u.used >= l.hard_limit
       offset 0);

-- name: list_served
-- The executions among the next :limit listed ones after a position that are blocked by their route although a live worker serves it, the
-- longest blocked first, and the last position read; null if there are no more. Every claim that admits has the reserved capabilities.
with clock as materialized (select ff_now() as now),
page as materialized (
  select i.at, i.partition_key, i.execution_id
    from listed i
   where i.public_state = 'waiting' and (i.at, i.execution_id) > (:since_at::bigint, :since_id::uuid)
   order by i.at, i.execution_id limit :limit
),
reached as materialized (select p.at, p.execution_id from page p order by p.at desc, p.execution_id desc limit 1),
blocked as materialized (
  select e.* from page p
   cross join lateral (
         select p.at, e.partition_key, e.execution_id, e.queue_no from execution e
          where e.partition_key = p.partition_key and e.execution_id = p.execution_id and e.eligibility_state = 'blocked_by_route' limit 1) e
   where p.execution_id <> all(:skipped::uuid[])
),
served as materialized (
  select b.queue_no
    from (select distinct queue_no from blocked) b
    join queue q on q.queue_no = b.queue_no
    join kind k on k.kind_no = q.kind_no
    join lane l on l.lane_no = q.lane_no
    join namespace n on n.namespace_no = q.namespace_no
    join route t on t.route_no = q.route_no
    join capability_set s on s.capability_set_no = t.capability_set_no
   where exists (
         select from worker w cross join clock c
          where w.lapses_at > c.now and l.lane_id = any(w.lanes) and (w.serves_all_namespaces or w.namespace = n.namespace)
            and (w.kinds is null or k.execution_kind = any(w.kinds))
            and w.capabilities @> array(select r from unnest(s.required) r where not starts_with(r, :reserved)))
)
select r.at as reached_at, r.execution_id as reached_id, (select count(*) from page) as seen, e.*
  from (values (true)) as one_row
  left join reached r on true
  left join lateral (
       select b.partition_key, b.execution_id from blocked b where b.queue_no in (select queue_no from served)
        order by b.at, b.execution_id) e on true;

-- name: lock_blocked
-- Locks those of the given executions that are free and blocked in one of the given states.
select e.partition_key, e.execution_id
  from unnest(:partition_keys::smallint[], :execution_ids::uuid[]) as i(partition_key, execution_id)
 cross join lateral (
       select e.partition_key, e.execution_id from execution e
        where e.partition_key = i.partition_key and e.execution_id = i.execution_id
          and e.eligibility_state = any(:states::eligibility_state[])
          for update skip locked) e;
