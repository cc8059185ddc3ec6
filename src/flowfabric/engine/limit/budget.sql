-- name: insert_budget
-- Inserts a budget with its limits, unless there is one with this id; returns a row if it was inserted. What was counted before is kept.
with clock as materialized (select ff_now() as now),
inserted as (
  insert into budget (partition_key, budget_id, scope_type, scope_id, enforcement_mode, on_hard_limit, on_soft_limit,
                      reset_interval_ms, created_at)
  select :partition_key, :budget_id, :scope_type, :scope_id, :enforcement_mode, :on_hard_limit, :on_soft_limit,
         :reset_interval_ms::bigint, now
    from clock
  on conflict (partition_key, budget_id) do nothing
  returning partition_key, budget_id, case when reset_interval_ms > 0 then created_at + reset_interval_ms end as next_reset_at
),
limited as (
  insert into budget_limit (partition_key, budget_id, dimension, hard_limit, soft_limit)
  select i.partition_key, i.budget_id, l.*
    from inserted i cross join unnest(:dimensions::text[], :hard_limits::bigint[], :soft_limits::bigint[]) as l
),
opened as (
  insert into budget_account (partition_key, budget_id, next_reset_at)
  select partition_key, budget_id, next_reset_at from inserted
  on conflict (partition_key, budget_id) do update set next_reset_at = excluded.next_reset_at
)
select 1 from inserted;

-- name: read_budget
-- A budget with its limits and counters by dimension.
select b.*, a.breach_count, a.soft_breach_count, a.reset_count, a.last_breach_at, a.last_breach_dim, a.last_reset_at, a.next_reset_at,
       (select jsonb_object_agg(l.dimension, jsonb_build_array(l.hard_limit, l.soft_limit)) from budget_limit l
         where l.partition_key = b.partition_key and l.budget_id = b.budget_id)::text as limits,
       (select jsonb_object_agg(u.dimension, jsonb_build_array(u.used, u.reserved)) from budget_usage u
         where u.partition_key = b.partition_key and u.budget_id = b.budget_id)::text as counters
  from budget b
  join budget_account a using (partition_key, budget_id)
 where b.partition_key = :partition_key and b.budget_id = :budget_id;

-- name: list_limits_and_usage
-- The limits and the counters of a budget, one row for each dimension that has either.
select dimension, l.hard_limit, l.soft_limit, u.used
  from (select l.dimension, l.hard_limit, l.soft_limit from budget_limit l
         where l.partition_key = :partition_key and l.budget_id = :budget_id offset 0) l
  full join (select u.dimension, u.used from budget_usage u
              where u.partition_key = :partition_key and u.budget_id = :budget_id offset 0) u using (dimension)
 order by dimension;

-- name: list_limits
-- The limits of a budget whose account the transaction has locked; one row without a dimension if it has none, no row if it is not
-- defined.
select l.dimension, l.hard_limit, l.soft_limit
  from budget b
  left join lateral (
       select l.dimension, l.hard_limit, l.soft_limit from budget_limit l
        where l.partition_key = b.partition_key and l.budget_id = b.budget_id and l.dimension = any(:dimensions::text[])) l on true
 where b.partition_key = :partition_key and b.budget_id = :budget_id;

-- name: set_limits
-- Sets the limits of dimensions of a budget whose account the transaction has locked.
insert into budget_limit (partition_key, budget_id, dimension, hard_limit, soft_limit)
select :partition_key, :budget_id, l.* from unnest(:dimensions::text[], :hard_limits::bigint[], :soft_limits::bigint[]) as l
    on conflict (partition_key, budget_id, dimension) do update
   set hard_limit = excluded.hard_limit, soft_limit = excluded.soft_limit;

-- name: lock_due_accounts
-- Locks the accounts of budgets whose next reset is due, the longest due first, except :skipped and those locked elsewhere.
select a.partition_key, a.budget_id
  from budget_account a
 where a.next_reset_at <= (select ff_now()) and a.budget_id <> all(:skipped::uuid[])
 order by a.next_reset_at limit :limit for update skip locked;

-- name: reset_accounts
-- Sets the counters of defined budgets to zero whose accounts the transaction has locked, and deletes the ledgers of executions. What is
-- reserved stays reserved. Returns the next resets.
with clock as materialized (select ff_now() as now),
due as materialized (
  select b.partition_key, b.budget_id, b.reset_interval_ms
    from unnest(:partition_keys::smallint[], :budget_ids::uuid[]) as i(partition_key, budget_id)
   cross join lateral (
         select b.* from budget b where b.partition_key = i.partition_key and b.budget_id = i.budget_id limit 1) b
),
zeroed as (
  update budget_usage u set used = 0 from due d
   where u.partition_key = any(array[d.partition_key]) and u.budget_id = d.budget_id and u.used > 0
),
forgotten as (
  delete from budget_spend s using due d
   where s.partition_key = any(array[d.partition_key]) and s.budget_id = d.budget_id
)
update budget_account a
   set reset_count = a.reset_count + 1, last_reset_at = c.now, last_breach_at = null, last_breach_dim = null,
       next_reset_at = case when d.reset_interval_ms > 0 then c.now + d.reset_interval_ms end
  from clock c cross join due d
 where a.partition_key = any(array[d.partition_key]) and a.budget_id = d.budget_id
returning a.next_reset_at;

-- fragment: counted
-- What the ledgers and the reservations of a budget a add up to, by dimension, beside its counters.
select c.dimension, coalesce(u.used, 0) as used, coalesce(u.reserved, 0) as reserved,
       least(c.spent, :max_total::bigint)::bigint as spent, least(c.kept, :max_total)::bigint as kept
  from (select p.dimension, sum(p.spent) as spent, sum(p.kept) as kept
          from (select s.dimension, s.spent, 0 as kept from budget_spend s
                 where s.partition_key = a.partition_key and s.budget_id = a.budget_id
                union all
                select r.dimension, 0, r.amount from budget_reservation r
                 where r.budget_partition = a.partition_key and r.budget_id = a.budget_id
                union all
                select u.dimension, 0, 0 from budget_usage u
                 where u.partition_key = a.partition_key and u.budget_id = a.budget_id) p
         group by p.dimension) c
  left join lateral (
       select u.used, u.reserved from budget_usage u
        where u.partition_key = a.partition_key and u.budget_id = a.budget_id and u.dimension = c.dimension limit 1) u on true

-- name: list_counted
-- A page of the budgets after one of them, each with whether its counters have to be corrected.
select a.partition_key, a.budget_id,
       exists (select from (
         -- include: counted
       ) d where d.used < d.spent or d.reserved <> d.kept) as is_wrong
  from (select a.partition_key, a.budget_id from budget_account a
         where (a.partition_key, a.budget_id) > (:after_partition::int, :after_budget::uuid)
         order by a.partition_key, a.budget_id limit :limit) a
 order by a.partition_key, a.budget_id;

-- name: correct_counters
-- Corrects the counters of a budget whose account the transaction has locked: no total is below the sum of its ledgers, and what is
-- reserved is the sum of its reservations. Returns what was corrected.
with wrong as materialized (
  select a.partition_key, a.budget_id, d.*
    from (select :partition_key::smallint as partition_key, :budget_id::uuid as budget_id) a
   cross join lateral (
         -- include: counted
         ) d
   where d.used < d.spent or d.reserved <> d.kept
),
corrected as (
  insert into budget_usage (partition_key, budget_id, dimension, used, reserved)
  select partition_key, budget_id, dimension, greatest(used, spent), kept from wrong
  on conflict (partition_key, budget_id, dimension) do update set used = excluded.used, reserved = excluded.reserved
)
select dimension, used, reserved, greatest(used, spent) as now_used, kept as now_reserved from wrong;
