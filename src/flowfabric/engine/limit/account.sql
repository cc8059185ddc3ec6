-- name: lock_accounts
-- Locks the accounts of budgets in the order given until the transaction ends, and returns which exist. With :waits_briefly this and
-- later statements of the transaction wait at most 250 ms for a row.
with patience as materialized (
  select set_config('lock_timeout', case when :waits_briefly::boolean then '250ms' else current_setting('lock_timeout') end, true))
select a.budget_id
  from patience
 cross join unnest(:partition_keys::smallint[], :budget_ids::uuid[]) with ordinality as i(partition_key, budget_id, nth)
 cross join lateral (
       select a.budget_id from budget_account a
        where a.partition_key = i.partition_key and a.budget_id = i.budget_id
          for update) a
 order by i.nth;

-- name: insert_accounts
-- Inserts the accounts of budgets that have none.
insert into budget_account (partition_key, budget_id)
select partition_key, budget_id from unnest(:partition_keys::smallint[], :budget_ids::uuid[]) as i(partition_key, budget_id)
    on conflict (partition_key, budget_id) do nothing;

-- name: read_counters
-- Of budgets whose accounts the transaction has locked: the limits and counters of the given dimensions (nth is null), and which of the
-- given keys were used before (nth is the position, counted from 1).
with clock as materialized (select ff_now() as now)
select null::bigint as nth, i.budget_id, i.dimension, coalesce(b.on_hard_limit, '') as on_hard_limit,
       coalesce(l.hard_limit, 0) as hard_limit, coalesce(l.soft_limit, 0) as soft_limit,
       coalesce(u.used, 0) as used, coalesce(u.reserved, 0) as reserved
  from unnest(:partition_keys::smallint[], :budget_ids::uuid[], :dimensions::text[]) as i(partition_key, budget_id, dimension)
  left join lateral (
       select b.on_hard_limit from budget b
        where b.partition_key = i.partition_key and b.budget_id = i.budget_id limit 1) b on true
  left join lateral (
       select l.hard_limit, l.soft_limit from budget_limit l
        where l.partition_key = i.partition_key and l.budget_id = i.budget_id and l.dimension = i.dimension limit 1) l on true
  left join lateral (
       select u.used, u.reserved from budget_usage u
        where u.partition_key = i.partition_key and u.budget_id = i.budget_id and u.dimension = i.dimension limit 1) u on true
union all
select i.nth, i.scope, i.key, null, null, null, null, null
  from clock c
 cross join unnest(:key_partitions::smallint[], :operations::keyed_operation[], :scopes::uuid[], :keys::text[])
       with ordinality as i(partition_key, operation, scope, key, nth)
 cross join lateral (
       select k.expires_at from idempotency_key k
        where k.partition_key = i.partition_key and k.operation = i.operation and k.scope = i.scope and k.key = i.key limit 1) k
 where k.expires_at > c.now;

-- name: list_reservations
-- The amounts that leases have reserved under the given keys.
select i.nth, r.dimension, r.amount
  from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :budget_ids::uuid[], :reservation_keys::text[], :lease_epochs::bigint[])
       with ordinality as i(partition_key, execution_id, budget_id, reservation_key, lease_epoch, nth)
 cross join lateral (
       select r.dimension, r.amount, r.lease_epoch from budget_reservation r
        where r.partition_key = i.partition_key and r.execution_id = i.execution_id and r.budget_id = i.budget_id
          and r.reservation_key = i.reservation_key offset 0) r
 where r.lease_epoch = i.lease_epoch;

-- name: write_counters
-- Stores counters of budgets whose accounts the transaction has locked, adds to the ledgers of executions and to the breaches, deletes
-- settled reservations, and stores new ones, whose executions the transaction has locked, and the keys of the calls for :key_ttl_ms.
with clock as materialized (select ff_now() as now),
counted as (
  insert into budget_usage (partition_key, budget_id, dimension, used, reserved)
  select * from unnest(:partition_keys::smallint[], :budget_ids::uuid[], :dimensions::text[], :used::bigint[], :reserved::bigint[])
  on conflict (partition_key, budget_id, dimension) do update set used = excluded.used, reserved = excluded.reserved
),
spent as (
  insert into budget_spend as s (partition_key, budget_id, execution_partition, execution_id, dimension, spent)
  select * from unnest(:spend_partitions::smallint[], :spend_budgets::uuid[], :spend_execution_partitions::smallint[],
                       :spend_executions::uuid[], :spend_dimensions::text[], :spend_amounts::bigint[])
  on conflict (partition_key, budget_id, execution_id, dimension) do update
     set spent = least(s.spent::numeric + excluded.spent, :max_total::bigint)
),
keyed as (
  insert into idempotency_key (partition_key, operation, scope, key, subject_partition, subject_id, expires_at)
  select i.*, c.now + :key_ttl_ms::bigint
    from clock c
   cross join unnest(:key_partitions::smallint[], :operations::keyed_operation[], :scopes::uuid[], :keys::text[],
                     :subject_partitions::smallint[], :subject_ids::uuid[]) as i
  on conflict (partition_key, operation, scope, key) do update
     set expires_at = excluded.expires_at, subject_partition = excluded.subject_partition, subject_id = excluded.subject_id
),
settled as (
  delete from budget_reservation r
   using unnest(:settled_partitions::smallint[], :settled_executions::uuid[], :settled_budgets::uuid[], :settled_keys::text[],
                :settled_epochs::bigint[]) as i(partition_key, execution_id, budget_id, reservation_key, lease_epoch)
   where r.partition_key = any(array[i.partition_key]) and r.execution_id = i.execution_id and r.budget_id = i.budget_id
     and r.reservation_key = i.reservation_key and r.lease_epoch = i.lease_epoch
),
reserved as (
  insert into budget_reservation (partition_key, execution_id, budget_partition, budget_id, reservation_key, lease_epoch, dimension,
                                  amount, reserved_at)
  select r.*, c.now
    from clock c
   cross join unnest(:new_partitions::smallint[], :new_executions::uuid[], :new_budget_partitions::smallint[], :new_budgets::uuid[],
                     :new_keys::text[], :new_epochs::bigint[], :new_dimensions::text[], :new_amounts::bigint[]) as r
),
attached as (
  update execution e set attached = e.attached | 16
    from (select distinct * from unnest(:new_partitions, :new_executions)) as r(partition_key, execution_id)
   where e.partition_key = any(array[r.partition_key]) and e.execution_id = r.execution_id and e.attached & 16 = 0
)
update budget_account a
   set breach_count = a.breach_count + i.breaches, soft_breach_count = a.soft_breach_count + i.soft_breaches,
       last_breach_at = case when i.breaches > 0 then c.now else a.last_breach_at end,
       last_breach_dim = coalesce(i.breached, a.last_breach_dim)
  from clock c
 cross join unnest(:breach_partitions::smallint[], :breach_budgets::uuid[], :breaches::bigint[], :soft_breaches::bigint[],
                   :breached::text[]) as i(partition_key, budget_id, breaches, soft_breaches, breached)
 where a.partition_key = any(array[i.partition_key]) and a.budget_id = i.budget_id;

-- name: list_lanes_of_budgets
-- The lanes that have queues with one of these budgets.
select distinct l.lane_id
  from queue q
 cross join lateral (select l.lane_id from lane l where l.lane_no = q.lane_no limit 1) l
 where q.budget_ids && :budget_ids::uuid[];
