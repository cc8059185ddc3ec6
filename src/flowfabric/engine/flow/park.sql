-- name: count_unresolved
-- How many applied inbound edges of an execution that the transaction has locked are unresolved, if these still decide whether it runs;
-- no row if none were ever applied.
select g.applied_count - g.succeeded_count - g.failed_count - g.skipped_count as unresolved
  from execution e
 cross join lateral (
       select g.* from edge_group g
        where g.partition_key = e.partition_key and g.flow_id = e.flow_id and g.downstream_id = e.execution_id limit 1) g
 where e.partition_key = :partition_key and e.execution_id = :execution_id and g.group_state = 'pending';
