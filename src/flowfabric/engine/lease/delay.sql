-- name: promote_delayed
-- Makes due delayed executions claimable: the named ones, or the oldest after :since when none is named; their attempt
-- state says how they will be claimed. A named one that was put aside under the lease of :lease_epoch need not be due.
with clock as materialized (select ff_now() as now),
due as materialized (
  select e.partition_key, e.execution_id
    from clock c
   cross join lateral (
         select e.partition_key, e.execution_id
           from execution e
          where :execution_ids::uuid[] is null
            and e.due_at > :since and e.due_at <= c.now
            and e.eligibility_state = 'not_eligible_until_time' and e.delay_until <= c.now
          order by e.due_at limit :limit
            for update skip locked) e
  union all
  select e.partition_key, e.execution_id
    from clock c
   cross join lateral (
         select e.partition_key, e.execution_id
           from unnest(:partition_keys::smallint[], :execution_ids::uuid[]) as i(partition_key, execution_id)
           join execution e using (partition_key, execution_id)
          where e.eligibility_state = 'not_eligible_until_time'
            and (e.delay_until <= c.now or e.lease_epoch = :lease_epoch::bigint)
            for update of e skip locked) e
),
promoted as (
  update execution e
     set eligibility_state = :to_eligibility, blocking_reason = :to_blocking, blocking_detail = null, delay_until = null,
         last_transition_at = c.now, last_mutation_at = c.now
    from due d cross join clock c
   where e.partition_key = d.partition_key and e.execution_id = d.execution_id
  returning e.lane_no, e.queue_no, e.place, e.public_state
)
select l.lane_id, p.queue_no, p.place, p.public_state
  from promoted p join lane l using (lane_no);
