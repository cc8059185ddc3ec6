-- name: insert_namespace
-- The number of a namespace, inserted if new; no row if another transaction is inserting it.
with made as (
  insert into namespace (namespace)
  select :namespace where not exists (select from namespace where namespace = :namespace)
  on conflict do nothing returning namespace_no)
select namespace_no from made union all select namespace_no from namespace where namespace = :namespace;

-- name: insert_lane
-- The number of a lane, inserted if new; no row if another transaction is inserting it.
with made as (
  insert into lane (lane_id, registered_at, registered_by)
  select :lane_id, ff_now(), :registered_by where not exists (select from lane where lane_id = :lane_id)
  on conflict do nothing returning lane_no)
select lane_no from made union all select lane_no from lane where lane_id = :lane_id;

-- name: insert_kind
-- The number of an execution kind, inserted if new; no row if another transaction is inserting it.
with made as (
  insert into kind (execution_kind, digest)
  select :execution_kind, :digest where not exists (select from kind where digest = :digest)
  on conflict do nothing returning kind_no)
select kind_no from made union all select kind_no from kind where digest = :digest;

-- name: insert_worker_identity
-- The number of a worker process, inserted if new and marked as in use; no row if another transaction is inserting it.
with made as (
  insert into worker_identity (worker_id, worker_instance_id, seen_at)
  select :worker_id, :worker_instance_id, ff_now()
   where not exists (select from worker_identity where worker_id = :worker_id and worker_instance_id = :worker_instance_id)
  on conflict do nothing returning worker_no),
seen as (
  update worker_identity set seen_at = (select ff_now())
   where worker_id = :worker_id and worker_instance_id = :worker_instance_id and seen_at < (select ff_now()) - 60000)
select worker_no, true as is_new from made
union all
select worker_no, false from worker_identity where worker_id = :worker_id and worker_instance_id = :worker_instance_id;

-- name: insert_configuration
-- Stores the partition counts at the first start and returns the stored ones; no row if another process is storing them.
with made as (
  insert into configuration (flow_partitions, budget_partitions, quota_partitions)
  select :flow, :budget, :quota where not exists (select from configuration)
  on conflict do nothing returning flow_partitions, budget_partitions, quota_partitions)
select * from made union all select flow_partitions, budget_partitions, quota_partitions from configuration;

-- name: list_configuration
-- The stored partition counts; no row before the first start.
select flow_partitions, budget_partitions, quota_partitions from configuration;
