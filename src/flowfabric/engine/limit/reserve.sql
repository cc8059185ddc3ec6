-- name: lock_reserved_accounts
-- Locks the accounts of the budgets of which executions have reserved something, in the order of their keys.
select a.budget_id
  from (select distinct r.budget_partition, r.budget_id
          from unnest(:partition_keys::smallint[], :execution_ids::uuid[]) as i(partition_key, execution_id)
         cross join lateral (
               select r.budget_partition, r.budget_id from budget_reservation r
                where r.partition_key = i.partition_key and r.execution_id = i.execution_id offset 0) r
         order by 1, 2 offset 0) r
 cross join lateral (
       select a.budget_id from budget_account a
        where a.partition_key = r.budget_partition and a.budget_id = r.budget_id
          for update) a;

-- name: take_reservations
-- Deletes the reservations of executions and subtracts them from the counters of their budgets, whose accounts the transaction has
-- locked. Returns the lanes that have queues with a budget of which something is left again.
with taken as (
  delete from budget_reservation r
   using unnest(:partition_keys::smallint[], :execution_ids::uuid[]) as i(partition_key, execution_id)
   where r.partition_key = any(array[i.partition_key]) and r.execution_id = i.execution_id
  returning r.budget_partition, r.budget_id, r.dimension, r.amount
),
total as materialized (
  select budget_partition, budget_id, dimension, sum(amount) as amount from taken group by 1, 2, 3
),
returned as (
  update budget_usage u set reserved = greatest(u.reserved - t.amount, 0)
    from total t
   where u.partition_key = any(array[t.budget_partition]) and u.budget_id = t.budget_id and u.dimension = t.dimension
  returning u.partition_key, u.budget_id, u.dimension, u.used::numeric + u.reserved as left_over, t.amount
),
freed as materialized (
  select distinct r.budget_id
    from returned r
   cross join lateral (
         select l.hard_limit from budget_limit l
          where l.partition_key = r.partition_key and l.budget_id = r.budget_id and l.dimension = r.dimension limit 1) l
   where l.hard_limit > r.left_over and l.hard_limit <= r.left_over + r.amount
)
select distinct l.lane_id
  from (select array_agg(budget_id) as budget_ids from freed having count(*) > 0) f
  join queue q on q.budget_ids && f.budget_ids
 cross join lateral (select l.lane_id from lane l where l.lane_no = q.lane_no limit 1) l;
