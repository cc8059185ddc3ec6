-- name: read_admitting_keys
-- What quota keys that the transaction has locked have admitted, with their limits, and then the guards of the given pairs of quota key and
-- execution: whether they are live, so that no second token is taken, and whether they hold a slot. The slots of expired guards are free.
-- Keys of undefined quotas have no limits.
with clock as materialized (select ff_now() as now)
select k.quota_key_no, null::uuid as execution_id, k.quota_policy_id,
       k.taken - (select coalesce(sum(t.returned), 0)::bigint from slot_return t where t.quota_key_no = k.quota_key_no)
         - (select count(*) from quota_admission g
             where g.quota_key_no = k.quota_key_no and g.has_slot and g.guard_until <= c.now) as used,
       k.window_ats, k.window_tokens, p.window_seconds, p.max_requests_per_window, p.max_concurrent, p.jitter_ms, c.now,
       null::boolean as is_live, null::boolean as has_slot, null::bigint as token_at,
       null::bigint as tokens
  from clock c
 cross join unnest(:quota_key_nos::int[]) as i(quota_key_no)
 cross join lateral (select k.* from quota_key k where k.quota_key_no = i.quota_key_no limit 1) k
  left join lateral (
       select p.* from quota_policy p
        where p.partition_key = k.partition_key and p.quota_policy_id = k.quota_policy_id limit 1) p on true
union all
select i.quota_key_no, i.execution_id, null, null, null, null, null, null, null, null, c.now,
       g.guard_until > c.now and not g.is_released, g.has_slot, g.token_at, g.tokens
  from clock c
 cross join unnest(:guard_keys::int[], :execution_ids::uuid[]) as i(quota_key_no, execution_id)
 cross join lateral (
       select g.has_slot, g.guard_until, g.is_released, g.token_at, g.tokens from quota_admission g
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
insert into quota_admission as g (quota_key_no, partition_key, execution_id, admitted_at, guard_until, token_at, tokens, has_slot)
select quota_key_no, partition_key, execution_id, :now, guard_until, token_at, tokens, false
  from unnest(:guard_keys::int[], :partition_keys::smallint[], :execution_ids::uuid[], :guards_until::bigint[], :tokens_at::bigint[],
              :tokens::bigint[]) as i(quota_key_no, partition_key, execution_id, guard_until, token_at, tokens)
on conflict (quota_key_no, execution_id) do update
   set admitted_at = case when excluded.guard_until > 0 then excluded.admitted_at else g.admitted_at end,
       token_at = case when excluded.guard_until > 0 then excluded.token_at else g.token_at end,
       tokens = case when excluded.guard_until > 0 then excluded.tokens else g.tokens end,
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

-- name: take_slots
-- Takes a slot of each of these locked quota keys that have a cap, whether one is free or not, and returns the keys. The slot of a guard
-- of the execution passes to it.
with needed as materialized (
  select k.quota_key_no, g.has_slot
    from unnest(:quota_key_nos::int[]) as i(quota_key_no)
   cross join lateral (
         select k.quota_key_no, k.partition_key, k.quota_policy_id from quota_key k where k.quota_key_no = i.quota_key_no limit 1) k
   cross join lateral (
         select from quota_policy p
          where p.partition_key = k.partition_key and p.quota_policy_id = k.quota_policy_id and p.max_concurrent > 0 limit 1) p
    left join lateral (
         select g.has_slot from quota_admission g
          where g.quota_key_no = k.quota_key_no and g.execution_id = :execution_id and g.has_slot limit 1) g on true
),
passed as (
  update quota_admission g set has_slot = false
    from needed n
   where n.has_slot and g.quota_key_no = any(array[n.quota_key_no]) and g.execution_id = :execution_id
),
counted as (
  update quota_key k set taken = k.taken + 1
    from needed n
   where n.has_slot is null and k.quota_key_no = any(array[n.quota_key_no])
)
select quota_key_no from needed order by quota_key_no;

-- name: return_expired_slots
-- Gives back the slots of executions whose grant has expired, except those that another session has locked; returns how many grants
-- it has looked at, and the keys in which slots became free.
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
freed as (
  update execution e set slot_keys = null, attached = e.attached & ~8 from expired x
   where e.ctid = x.execution_tid and x.slot_keys is not null
  returning x.tid, x.slot_keys
),
-- An execution that has changed since the statement began is not found by its ctid, and is left for the next time.
seen as (
  update claim_grant g set has_slots = false
    from expired x
   where g.ctid = x.tid and (x.slot_keys is null or x.tid in (select tid from freed))
),
returned as (
  insert into slot_return as s (quota_key_no, shard, returned)
  select n.quota_key_no, :slot_shard::smallint, count(*) from freed f cross join lateral unnest(f.slot_keys) as n(quota_key_no)
   group by n.quota_key_no order by n.quota_key_no
  on conflict (quota_key_no, shard) do update set returned = s.returned + excluded.returned
  returning s.quota_key_no
)
select (select count(*) from expired) as seen, array(select quota_key_no from returned order by quota_key_no) as freed_keys;
