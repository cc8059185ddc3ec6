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

-- name: take_spend
-- Deletes the ledger of an execution and subtracts it from the counters of a budget whose account the transaction has locked.
with released as (
  delete from budget_spend
   where partition_key = :partition_key and budget_id = :budget_id and execution_id = :execution_id
     and execution_partition = :execution_partition
  returning dimension, spent
)
update budget_usage u set used = greatest(u.used - r.spent, 0)
  from released r
 where u.partition_key = :partition_key and u.budget_id = :budget_id and u.dimension = r.dimension
returning u.dimension;
