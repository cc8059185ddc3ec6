-- name: lock_for_cancel
-- Holds one execution, with what the fence of a cancel is compared with.
select lifecycle_phase, ownership_state, terminal_outcome, lease_epoch, lease_id, attempt_id, public_state
  from execution
 where partition_key = :partition_key and execution_id = :execution_id
   for update;
