-- name: lock_admitting_keys
-- Locks quota keys in order, and reads their limits and what they have admitted. Slots given back since the statement began are not
-- seen: the number in use is never too low. The slots of expired guards are free. Keys of undefined quotas have no limits.
with clock as materialized (select ff_now() as now)
select k.quota_key_no, k.quota_policy_id,
       k.taken - coalesce((select sum(t.returned) from slot_return t where t.quota_key_no = k.quota_key_no), 0)::bigint
         - (select count(*) from quota_admission g
             where g.quota_key_no = k.quota_key_no and g.has_slot and g.guard_until <= c.now) as used,
       k.window_ats, k.window_tokens, p.window_seconds, p.max_requests_per_window, p.max_concurrent, p.jitter_ms,
       (select true from quota_admission g where g.quota_key_no = k.quota_key_no limit 1) is not null as has_guards, c.now
  from quota_key k
 cross join clock c
  left join lateral (
       select p.* from quota_policy p
        where p.partition_key = k.partition_key and p.quota_policy_id = k.quota_policy_id limit 1) p on true
 where k.quota_key_no = any(:quota_key_nos::int[])
 order by k.quota_key_no
   for update of k;

-- name: list_guards
-- The guards of the given pairs of quota key and execution: whether they are live, and hold a slot.
select i.nth - 1 as at, g.guard_until > :now and not g.is_released as is_live, g.has_slot
  from unnest(:quota_key_nos::int[], :execution_ids::uuid[]) with ordinality as i(quota_key_no, execution_id, nth)
 cross join lateral (
       select g.has_slot, g.guard_until, g.is_released from quota_admission g
        where g.quota_key_no = i.quota_key_no and g.execution_id = i.execution_id limit 1) g;

-- name: book
-- Stores what locked quota keys have admitted, and the guards of executions that took a token.
with booked as (
  update quota_key k
     set taken = k.taken + i.slots, window_ats = coalesce(i.window_ats::bigint[], k.window_ats),
         window_tokens = coalesce(i.window_tokens::bigint[], k.window_tokens)
    from unnest(:quota_key_nos::int[], :slots::int[], :window_ats::text[], :window_tokens::text[])
         as i(quota_key_no, slots, window_ats, window_tokens)
   where k.quota_key_no = any(array[i.quota_key_no])
)
insert into quota_admission as g (quota_key_no, partition_key, execution_id, admitted_at, guard_until, token_at, has_slot)
select quota_key_no, partition_key, execution_id, :now, guard_until, :now, false
  from unnest(:guard_keys::int[], :partition_keys::smallint[], :execution_ids::uuid[], :guards_until::bigint[])
       as i(quota_key_no, partition_key, execution_id, guard_until)
on conflict (quota_key_no, execution_id) do update
   set admitted_at = case when excluded.guard_until > 0 then excluded.admitted_at else g.admitted_at end,
       token_at = case when excluded.guard_until > 0 then excluded.token_at else g.token_at end,
       is_released = g.is_released and excluded.guard_until = 0,
       guard_until = greatest(g.guard_until, excluded.guard_until), has_slot = false;

-- name: mark_denied
-- Marks locked executions as blocked by a limit; they keep their entries of ready, so that a claim with room for them leases them.
with clock as materialized (select ff_now() as now),
marked as (
  update execution e
     set eligibility_state = i.to_eligibility, blocking_reason = i.to_blocking, blocking_detail = i.detail,
         last_transition_at = (select now from clock), last_mutation_at = null
    from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :to_eligibilities::eligibility_state[], :to_blockings::blocking_reason[],
                :details::text[]) as i(partition_key, execution_id, to_eligibility, to_blocking, detail)
   where e.partition_key = any(array[i.partition_key]) and e.execution_id = i.execution_id
  returning e.partition_key, e.execution_id, e.public_state
)
insert into listed (partition_key, execution_id, public_state, at)
select partition_key, execution_id, public_state, (select now from clock) from marked
on conflict (partition_key, execution_id) do update set public_state = excluded.public_state, at = excluded.at;

-- name: lock_keys_of_execution
-- Locks the quota keys of an execution that the transaction has locked; returns those that have slots, and of which it holds one.
select k.quota_key_no, case when e.granted_until is not null then e.slot_keys end as slot_keys
  from execution e
  join queue q using (queue_no)
  join quota_key k on k.quota_key_no = any(q.quota_key_nos)
  join quota_policy p on p.partition_key = k.partition_key and p.quota_policy_id = k.quota_policy_id and p.max_concurrent > 0
 where e.partition_key = :partition_key and e.execution_id = :execution_id
 order by k.quota_key_no
   for update of k;

-- name: take_slots
-- Takes a slot of each locked quota key, whether one is free or not.
update quota_key set taken = taken + 1 where quota_key_no = any(:quota_key_nos::int[]);

-- name: return_expired_slots
-- Gives back the slots of executions whose grant has expired, except those that another session has locked; returns how many grants
-- it has looked at.
with clock as materialized (select ff_now() as now),
expired as materialized (
  select g.ctid as tid, g.partition_key, g.execution_id, g.expires_at, e.tid as execution_tid, e.slot_keys
    from (select ctid, partition_key, execution_id, expires_at from claim_grant
           where has_slots and expires_at <= (select now from clock) order by expires_at limit :limit for update skip locked) g
   cross join lateral (
         select e.ctid as tid, case when e.granted_until = g.expires_at and e.ownership_state <> 'leased' then e.slot_keys end as slot_keys
           from execution e
          where e.partition_key = g.partition_key and e.execution_id = g.execution_id for update skip locked) e
),
seen as (
  update claim_grant g set has_slots = false from expired x where g.ctid = x.tid
),
freed as (
  update execution e set slot_keys = null, attached = e.attached & ~8 from expired x
   where e.ctid = x.execution_tid and x.slot_keys is not null
  returning x.slot_keys
),
returned as (
  insert into slot_return as s (quota_key_no, shard, returned)
  select n.quota_key_no, :slot_shard, count(*) from freed f cross join lateral unnest(f.slot_keys) as n(quota_key_no)
   group by n.quota_key_no order by n.quota_key_no
  on conflict (quota_key_no, shard) do update set returned = s.returned + excluded.returned
)
select count(*) as seen from expired;
