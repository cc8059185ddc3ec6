-- name: count_unsatisfied
-- How many inbound edges of an execution that the transaction has locked are applied and not resolved; no row if its group is decided, or
-- if it has none.
select g.applied_count - g.succeeded_count - g.failed_count - g.skipped_count as unsatisfied
  from execution e
 cross join lateral (
       select g.* from edge_group g
        where g.partition_key = e.partition_key and g.flow_id = e.flow_id and g.downstream_id = e.execution_id limit 1) g
 where e.partition_key = :partition_key and e.execution_id = :execution_id and g.group_state = 'pending';
