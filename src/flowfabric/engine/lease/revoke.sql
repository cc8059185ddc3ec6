-- name: read_owner
-- The worker instance that holds, or held last, the lease of an execution that the transaction has locked.
select w.worker_instance_id
  from execution e
  left join worker_identity w on w.worker_no = e.worker_no
 where e.partition_key = :partition_key and e.execution_id = :execution_id;
