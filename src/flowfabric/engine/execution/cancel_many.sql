-- name: lock_live_executions
-- Locks those of the given executions that have not ended and that no other session has locked. Returns the phase that the
-- statement saw, null if the execution does not exist, and the phase and the epoch of the locked row.
select p.lifecycle_phase as seen_phase, e.lifecycle_phase, e.lease_epoch
  from unnest(:partition_keys::smallint[], :execution_ids::uuid[]) with ordinality as i(partition_key, execution_id, nth)
  left join lateral (
       select p.lifecycle_phase from execution p
        where p.partition_key = i.partition_key and p.execution_id = i.execution_id limit 1) p on true
  left join lateral (
       select e.lifecycle_phase, e.lease_epoch from execution e
        where e.partition_key = i.partition_key and e.execution_id = i.execution_id and e.lifecycle_phase <> 'terminal'
          for update skip locked) e on true
 order by i.nth;
