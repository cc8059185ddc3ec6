-- name: read_creation
-- When an execution was created.
select created_at from execution where partition_key = :partition_key and execution_id = :execution_id;
