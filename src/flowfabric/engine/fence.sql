-- name: lock_execution
-- Waits for one row and holds it until the transaction ends; answers where it stands and whose it is.
select lifecycle_phase, ownership_state, eligibility_state, terminal_outcome, lease_epoch, lease_id, attempt_id, attempt_count
  from execution
 where partition_key = :partition_key and execution_id = :execution_id
   for update;
