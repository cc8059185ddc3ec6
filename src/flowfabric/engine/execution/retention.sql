-- name: read_due
-- What waits for a sweep: how many rows of each kind are due among the oldest :sample timers after :due_since, the oldest
-- of them, when the next is due within :ahead_ms, and how long the server took to find out.
with clock as materialized (select ff_now() as now),
timer as materialized (
  select e.* from clock c
   cross join lateral (
         select e.lifecycle_phase, e.ownership_state, e.eligibility_state, e.lease_expires_at, e.delay_until,
                e.attempt_timeout_at, e.suspension_timeout_at, e.deadline_at, e.due_at
           from execution e
          where e.due_at > :due_since and e.due_at <= c.now
          order by e.due_at limit :sample) e
)
select count(*) filter (where t.ownership_state = 'leased' and t.lease_expires_at <= c.now) as expired_leases,
       count(*) filter (where t.eligibility_state = 'not_eligible_until_time' and t.delay_until <= c.now) as elapsed_delays,
       count(*) filter (where t.lifecycle_phase = 'active' and t.attempt_timeout_at <= c.now) as attempt_timeouts,
       count(*) filter (where t.deadline_at <= c.now) as deadlines,
       count(*) filter (where t.lifecycle_phase = 'suspended' and t.suspension_timeout_at <= c.now) as suspension_timeouts,
       exists (select from execution
                where retain_until > :retained_since and retain_until <= (select now from clock)) as has_retained,
       exists (select from idempotency where expires_at <= (select now from clock))
         or exists (select from suspend_key where expires_at <= (select now from clock))
         or exists (select from signal_key where expires_at <= (select now from clock)) as has_spent_keys,
       exists (select from waitpoint where activated_at is null and closed_at is null and expires_at <= (select now from clock)) as has_expired_waitpoints,
       exists (select from claim_grant
                where expires_at <= (select now from clock) - :grant_memory_ms::bigint) as has_spent_grants,
       exists (select from worker where lapses_at < (select now from clock)) as has_expired_workers,
       exists (select from ff_silent_sessions(:silent_ms)) as has_silent_sessions,
       (select min(e.due_at) from execution e
         where e.due_at > (select now from clock) and e.due_at <= (select now from clock) + :ahead_ms::bigint) - c.now as next_due_in_ms,
       coalesce(min(t.due_at), c.now) as oldest_due_at, c.now,
       (extract(epoch from clock_timestamp() - statement_timestamp()) * 1000)::bigint as took_ms
  from clock c left join timer t on true
 group by c.now;

-- name: take_retained
-- Deletes ended executions past their retention with everything that belongs to them, the oldest after :since first;
-- answers how many, and up to when none is left but what is held elsewhere. By `any` of one element, as an equality lets
-- the planner walk all of an index and join what is due to it.
with clock as materialized (select ff_now() as now),
due as materialized (
  select e.* from clock c
   cross join lateral (
         select e.partition_key, e.execution_id, e.namespace_no, e.lane_no, e.created_at, e.retain_until
           from execution e
          where e.retain_until > :since and e.retain_until <= c.now
          order by e.retain_until limit :limit
            for update skip locked) e
),
attempts as (
  delete from attempt a using due d where a.partition_key = any(array[d.partition_key]) and a.execution_id = d.execution_id),
grants as (
  delete from claim_grant g using due d where g.partition_key = any(array[d.partition_key]) and g.execution_id = d.execution_id),
tags as (
  delete from execution_tag t using due d where t.partition_key = any(array[d.partition_key]) and t.execution_id = d.execution_id),
-- Where nothing was ever suspended, nothing is looked for.
waits as (
  delete from suspension s using due d
   where s.partition_key = any(array[d.partition_key]) and s.execution_id = d.execution_id and exists (select from suspension)),
waitpoints as (
  delete from waitpoint w using due d
   where w.partition_key = any(array[d.partition_key]) and w.execution_id = d.execution_id and exists (select from waitpoint)),
signals as (
  delete from signal g using due d
   where g.partition_key = any(array[d.partition_key]) and g.execution_id = d.execution_id and exists (select from signal)),
outcomes as (
  delete from suspend_key k using due d
   where k.partition_key = any(array[d.partition_key]) and k.execution_id = d.execution_id and exists (select from suspend_key)),
inputs as (
  delete from execution_input i using due d
   where i.namespace_no = any(array[d.namespace_no]) and i.lane_no = d.lane_no and i.created_at = d.created_at
     and i.partition_key = d.partition_key and i.execution_id = d.execution_id),
gone as (
  delete from execution e using due d where e.partition_key = any(array[d.partition_key]) and e.execution_id = d.execution_id
  returning 1)
select (select count(*) from gone) as trimmed, coalesce((select max(retain_until) from due), (select now from clock)) as reached;

-- name: take_spent_keys
-- Deletes idempotency entries past their time to live; answers how many.
with spent as (
  delete from idempotency
   where ctid = any(array(
         select ctid from idempotency
          where expires_at <= (select ff_now()) order by expires_at limit :limit for update skip locked))
  returning 1)
select count(*) as purged from spent;

-- name: take_spent_suspend_keys
-- Deletes what suspends came to under idempotency keys past their time to live; answers how many.
with spent as (
  delete from suspend_key
   where ctid = any(array(
         select ctid from suspend_key
          where expires_at <= (select ff_now()) order by expires_at limit :limit for update skip locked))
  returning 1)
select count(*) as purged from spent;

-- name: take_spent_signal_keys
-- Deletes idempotency keys of signals past their time to live; answers how many.
with spent as (
  delete from signal_key
   where ctid = any(array(
         select ctid from signal_key
          where expires_at <= (select ff_now()) order by expires_at limit :limit for update skip locked))
  returning 1)
select count(*) as purged from spent;

-- name: take_spent_grants
-- Deletes grants that expired this long ago; answers how many.
with spent as (
  delete from claim_grant
   where ctid = any(array(
         select ctid from claim_grant
          where expires_at <= (select ff_now()) - :grant_memory_ms::bigint
          order by expires_at limit :limit for update skip locked))
  returning 1)
select count(*) as purged from spent;
