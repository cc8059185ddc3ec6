-- name: list_flows_with_later_members
-- Those of the flows with members after a position in the order of creation.
select i.flow_id
  from unnest(:flow_ids::uuid[]) as i(flow_id)
 cross join lateral (
       select from execution e
        where e.flow_id = i.flow_id and (e.created_at, e.execution_id) > (:created_at::bigint, :execution_id::uuid) limit 1) e;

-- name: list_unsatisfied
-- The executions with dependencies that are not satisfied, by their positions: how many of these are impossible, and the upstream
-- executions that are among those given. The filter is a hashed subplan: a join would be a nested loop.
select i.nth, count(*) filter (where x.is_impossible) as edges,
       array_agg(x.upstream_id) filter (where (x.upstream_id in (select unnest(:execution_ids))) is true) as upstreams
  from unnest(:partition_keys::smallint[], :execution_ids::uuid[]) with ordinality as i(partition_key, execution_id, nth)
 cross join lateral (
       select x.upstream_id, x.state::text = 'impossible' as is_impossible from edge x
        where x.downstream_id = i.execution_id and x.partition_key is not distinct from i.partition_key
          and x.state::text in ('impossible', 'unsatisfied') offset 0) x
 group by i.nth;
