-- name: promote_delayed
-- Makes due delayed executions claimable: those whose ids are given, or without ids the oldest after :since except :skipped.
-- The attempt state decides whether the next claim resumes or retries. An execution whose id is given and that was delayed
-- under the lease of :lease_epoch need not be due.
with clock as materialized (select ff_now() as now),
named as materialized (
  select t.partition_key, t.execution_id
    from clock c
   cross join lateral (
         select t.partition_key, t.execution_id from timer t
          where :execution_ids::uuid[] is null and t.kind = 'delay' and t.due_at > :since and t.due_at <= c.now
            and t.execution_id <> all(:skipped::uuid[])
          order by t.due_at limit :limit) t
  union all
  select i.partition_key, i.execution_id
    from unnest(:partition_keys::smallint[], :execution_ids::uuid[]) as i(partition_key, execution_id)
),
due as materialized (
  select e.*, c.now
    from named n
   cross join clock c
   cross join lateral (
         select e.ctid as tid, e.partition_key, e.execution_id from execution e
          where e.partition_key = n.partition_key and e.execution_id = n.execution_id
            and e.eligibility_state = 'not_eligible_until_time'
            and (e.delay_until <= c.now or e.lease_epoch = :lease_epoch::bigint)
            for update skip locked) e
),
promoted as (
  update execution e
     set eligibility_state = :to_eligibility, blocking_reason = :to_blocking, blocking_detail = null, delay_until = null,
         last_transition_at = d.now, last_mutation_at = null
    from due d
   where e.ctid = d.tid
  returning e.partition_key, e.execution_id, e.lane_no, e.queue_no, e.place, e.public_state, d.now,
            (select q.route_no from queue q where q.queue_no = e.queue_no) as route_no
),
-- The kind is compared as text: with a plain equality, a plan made while the table is small would scan all of timer_due.
untimed as (
  delete from timer t using promoted p
   where t.partition_key = any(array[p.partition_key]) and t.execution_id = p.execution_id and t.kind::text = 'delay'
),
readied as (
  insert into ready (place, route_no, queue_no, partition_key, execution_id)
  select place, route_no, queue_no, partition_key, execution_id from promoted
),
listings as (
  insert into listed (partition_key, execution_id, public_state, at)
  select partition_key, execution_id, public_state, now from promoted where public_state = 'resumable'
  on conflict (partition_key, execution_id) do update set public_state = excluded.public_state, at = excluded.at
)
select l.lane_id, p.route_no, p.queue_no, p.place, p.public_state
  from promoted p join lane l using (lane_no);

-- name: list_delayed
-- The due delayed executions, the oldest after :since first, except :skipped.
select t.partition_key, t.execution_id
  from timer t
 where t.kind = 'delay' and t.due_at > :since and t.due_at <= (select ff_now()) and t.execution_id <> all(:skipped::uuid[])
 order by t.due_at limit :limit;
