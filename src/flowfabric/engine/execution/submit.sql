-- name: read_creation
-- The time of creation of an execution.
select created_at from execution where partition_key = :partition_key and execution_id = :execution_id;
