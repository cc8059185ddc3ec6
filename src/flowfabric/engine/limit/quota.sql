-- name: insert_quota_policy
-- Creates a quota policy; no row if there is one with its id.
insert into quota_policy (partition_key, quota_policy_id, window_seconds, max_requests_per_window, max_concurrent, jitter_ms, key_from,
                          weight_from, created_at)
select :partition_key, :quota_policy_id, :window_seconds, :max_requests_per_window, :max_concurrent, :jitter_ms, :key_from, :weight_from,
       ff_now()
on conflict (partition_key, quota_policy_id) do nothing
returning quota_policy_id;

-- name: set_quota_policy
-- Changes a quota policy; no row if there is none with this id.
update quota_policy
   set window_seconds = :window_seconds, max_requests_per_window = :max_requests_per_window, max_concurrent = :max_concurrent,
       jitter_ms = :jitter_ms, key_from = :key_from, weight_from = :weight_from
 where partition_key = :partition_key and quota_policy_id = :quota_policy_id
returning quota_policy_id;

-- name: read_quota_policy
-- The limits of a quota policy.
select window_seconds, max_requests_per_window, max_concurrent, jitter_ms from quota_policy
 where partition_key = :partition_key and quota_policy_id = :quota_policy_id;

-- name: insert_quota_key
-- Adds a key of a quota, unless it exists.
insert into quota_key (partition_key, quota_policy_id, key) values (:partition_key, :quota_policy_id, :key)
on conflict (partition_key, quota_policy_id, key) do nothing;

-- name: lock_quota_key
-- Locks a key of a quota until the transaction ends, waiting for it.
select quota_key_no from quota_key
 where partition_key = :partition_key and quota_policy_id = :quota_policy_id and key = :key
   for update;

-- name: lock_quota_keys
-- Locks keys of quotas until the transaction ends, in the order given, waiting for each; the caller gives them in ascending order.
select k.quota_key_no
  from unnest(:quota_key_nos::int[]) with ordinality as i(quota_key_no, nth)
 cross join lateral (select k.quota_key_no from quota_key k where k.quota_key_no = i.quota_key_no for update) k
 order by i.nth;

-- name: lock_free_quota_keys
-- The same without waiting; those that another session has locked are left out.
select k.quota_key_no
  from unnest(:quota_key_nos::int[]) with ordinality as i(quota_key_no, nth)
 cross join lateral (select k.quota_key_no from quota_key k where k.quota_key_no = i.quota_key_no for update skip locked) k
 order by i.nth;

-- name: read_standing
-- What a key that the transaction has locked has admitted, and the guard of one execution. The slots of expired guards are free.
with clock as materialized (select ff_now() as now)
select c.now, k.taken, k.window_ats, k.window_tokens,
       (select coalesce(sum(r.returned), 0)::bigint from slot_return r where r.quota_key_no = k.quota_key_no) as returned,
       (select count(*) from quota_admission a
         where a.quota_key_no = k.quota_key_no and a.has_slot and a.guard_until <= c.now) as expired_slots,
       g.token_at, g.tokens, coalesce(g.guard_until > c.now and not g.is_released, false) as is_guarded,
       coalesce(g.guard_until > c.now and g.has_slot, false) or coalesce(k.quota_key_no = any(e.slot_keys), false) as has_slot
  from clock c
 cross join quota_key k
  left join lateral (
       select g.token_at, g.tokens, g.guard_until, g.is_released, g.has_slot from quota_admission g
        where g.quota_key_no = k.quota_key_no and g.execution_id = :execution_id limit 1) g on true
  left join lateral (
       select e.slot_keys from execution e
        where e.partition_key = :partition_key and e.execution_id = :execution_id
          and (e.ownership_state = 'leased' or e.granted_until is not null) limit 1) e on true
 where k.quota_key_no = :quota_key_no;

-- name: set_window
-- Stores the tokens that are left in the window of a key that the transaction has locked.
update quota_key set window_ats = :window_ats, window_tokens = :window_tokens where quota_key_no = :quota_key_no;

-- name: write_admission
-- Stores what an admission has changed in a key that the transaction has locked, with the guard of the execution, and deletes the expired
-- guards whose slots :taken has no more.
with deleted_guards as (
  delete from quota_admission a
   where a.quota_key_no = :quota_key_no and a.has_slot and a.guard_until <= :now::bigint and a.execution_id <> :execution_id
),
counted as (
  update quota_key set taken = :taken, window_ats = :window_ats, window_tokens = :window_tokens where quota_key_no = :quota_key_no
)
insert into quota_admission (quota_key_no, partition_key, execution_id, admitted_at, guard_until, has_slot, token_at, tokens)
values (:quota_key_no, :partition_key, :execution_id, :now, :guard_until, :has_slot, :token_at, :tokens)
on conflict (quota_key_no, execution_id) do update
   set admitted_at = excluded.admitted_at, guard_until = excluded.guard_until, has_slot = excluded.has_slot, token_at = excluded.token_at,
       tokens = excluded.tokens, is_released = false;

-- name: list_admitting_keys
-- The keys of a quota that have a guard or a slot of an execution.
select k.quota_key_no
  from (select a.quota_key_no from quota_admission a
         where a.execution_id = :execution_id and not a.is_released
        union
        select s.quota_key_no
          from execution e cross join lateral unnest(e.slot_keys) as s(quota_key_no)
         where e.partition_key = :execution_partition and e.execution_id = :execution_id
           and (e.ownership_state = 'leased' or e.granted_until is not null)) i
 cross join lateral (
       select k.quota_key_no, k.partition_key, k.quota_policy_id from quota_key k where k.quota_key_no = i.quota_key_no limit 1) k
 where k.partition_key = :partition_key and k.quota_policy_id = :quota_policy_id
 order by k.quota_key_no;

-- name: release_guards
-- Releases the guards and the slots of an execution in keys that the transaction has locked after the execution; returns the keys in which
-- slots became free. The tokens stay.
with guard as materialized (
  select a.quota_key_no, a.has_slot from quota_admission a
   where a.quota_key_no = any(:quota_key_nos::int[]) and a.execution_id = :execution_id and not a.is_released
),
released as (
  update quota_admission a set has_slot = false, is_released = true
    from guard g
   where a.quota_key_no = g.quota_key_no and a.execution_id = :execution_id
),
own as materialized (
  select e.slot_keys, array(select unnest(e.slot_keys) except select unnest(:quota_key_nos) order by 1) as kept from execution e
   where e.partition_key = :partition_key and e.execution_id = :execution_id and e.slot_keys && :quota_key_nos
     and (e.ownership_state = 'leased' or e.granted_until is not null)
),
disowned as (
  update execution e
     set slot_keys = nullif(o.kept, '{}'), attached = case o.kept when '{}' then e.attached & ~8 else e.attached end
    from own o
   where e.partition_key = :partition_key and e.execution_id = :execution_id
),
freed as materialized (
  select f.quota_key_no, count(*) as slots
    from (select quota_key_no from guard where has_slot
          union all
          select s.quota_key_no from own cross join lateral unnest(own.slot_keys) as s(quota_key_no)
           where s.quota_key_no = any(:quota_key_nos)) f
   group by f.quota_key_no
)
update quota_key k set taken = k.taken - f.slots
  from freed f
 where k.quota_key_no = any(array[f.quota_key_no])
returning k.quota_key_no;

-- name: read_keys
-- What keys of quotas have admitted, with the limits of their policies; no limits if the policy is not defined.
with clock as materialized (select ff_now() as now)
select c.now, u.* from clock c cross join lateral ff_key_use(:quota_key_nos::int[], c.now) u;

-- fragment: holders
-- The real holders of slots by key: executions with a lease or a grant, which claims and grants name, and live guards. Grouped with the
-- keys of the page instead of joined with them: a join would compare all pairs.
holder as materialized (
  select s.quota_key_no, 1 as holders
    from (select m.partition_key, i.execution_id from claim m cross join lateral unnest(m.execution_ids) as i(execution_id)
          union
          select g.partition_key, g.execution_id from claim_grant g where g.has_slots) i
   cross join clock c
   cross join lateral (
         select e.slot_keys from execution e
          where e.partition_key = i.partition_key and e.execution_id = i.execution_id and e.attached & 8 <> 0
            and (e.ownership_state = 'leased' or e.granted_until is not null) limit 1) e
   cross join lateral unnest(e.slot_keys) as s(quota_key_no)
),
held as materialized (
  select h.quota_key_no, sum(h.holders) as holders
    from (select quota_key_no, holders, false as is_of_page from holder union all select quota_key_no, 0, true from page) h
   group by h.quota_key_no
  having bool_or(h.is_of_page)
),
counted as materialized (
  select k.quota_key_no, k.taken, k.window_ats, k.window_tokens, r.returned, h.holders + g.guards as holders,
         c.now - 1000 * coalesce(nullif(p.window_seconds, 0), :default_window_seconds::bigint) as window_start, p.window_seconds is not null as is_defined
    from clock c
   cross join held h
   cross join lateral (select k.* from quota_key k where k.quota_key_no = h.quota_key_no limit 1) k
    left join lateral (
         select p.window_seconds from quota_policy p
          where p.partition_key = k.partition_key and p.quota_policy_id = k.quota_policy_id limit 1) p on true
   cross join lateral (
         select coalesce(sum(r.returned), 0)::bigint as returned from slot_return r where r.quota_key_no = k.quota_key_no) r
   cross join lateral (
         select count(*) as guards from quota_admission a
          where a.quota_key_no = k.quota_key_no and a.has_slot and a.guard_until > c.now) g
)

-- name: list_miscounted_keys
-- Of the next :limit keys after a key, those whose slots in use are not those of their real holders, or that have tokens older than their
-- window; how many keys were read, and the last of them.
with clock as materialized (select ff_now() as now),
page as materialized (
  select k.* from quota_key k where k.quota_key_no > :after order by k.quota_key_no limit :limit
),
-- include: holders
select (select count(*) from page) as seen, (select max(quota_key_no) from page) as reached,
       array(select quota_key_no from counted
              where taken - returned <> holders or (is_defined and window_ats[1] <= window_start)
              order by quota_key_no) as miscounted;

-- name: recount_keys
-- Sets the slots in use of keys that the transaction has locked to the number of their real holders, and deletes their expired guards and
-- the tokens older than their window; returns the keys in which slots became free.
with clock as materialized (select ff_now() as now),
page as materialized (
  select k.* from quota_key k where k.quota_key_no = any(:quota_key_nos::int[])
),
-- include: holders
,
deleted_guards as (
  delete from quota_admission a using clock c
   where a.quota_key_no = any(:quota_key_nos) and a.has_slot and a.guard_until <= c.now
)
update quota_key k
   set taken = c.returned + c.holders,
       window_ats = case when c.is_defined
         then array(select w.at from unnest(c.window_ats) with ordinality as w(at, nth) where w.at > c.window_start order by w.nth)
         else c.window_ats end,
       window_tokens = case when c.is_defined
         then array(select w.tokens from unnest(c.window_ats, c.window_tokens) with ordinality as w(at, tokens, nth)
                     where w.at > c.window_start order by w.nth)
         else c.window_tokens end
  from counted c
 where k.quota_key_no = any(array[c.quota_key_no])
returning k.quota_key_no, c.taken - c.returned as was_used, c.holders as used;

-- name: take_expired_guards
-- Deletes expired guards that hold no slot; returns how many.
with expired as (
  delete from quota_admission
   where ctid = any(array(
         select ctid from quota_admission
          where guard_until <= (select ff_now()) and not has_slot order by guard_until limit :limit for update skip locked))
  returning 1)
select count(*) as purged from expired;

-- name: list_lanes_of_keys
-- The lanes with queues that a key of these limits.
select distinct l.lane_id
  from queue q join lane l using (lane_no)
 where q.quota_key_nos && :quota_key_nos::int[];

-- name: list_lanes_of_quotas
-- The lanes with queues that any quota limits.
select l.lane_id from lane l
 where exists (select from queue q where q.lane_no = l.lane_no and q.quota_key_nos <> '{}');
