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
