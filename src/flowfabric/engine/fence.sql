-- name: lock_execution
-- Waits for one row and holds it until the transaction ends.
select 1 from execution
 where partition_key = :partition_key and execution_id = :execution_id
   for update;
