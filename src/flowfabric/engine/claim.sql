-- name: claim_best
-- Leases the best claimable executions of the lanes this worker may serve, at most :limit; each queue's come in order.
-- spans: where to walk a queue whose head is known to be spent; a queue without spans is walked whole. With one queue the
-- lateral walk is lazy, so :limit bounds the rows it locks; with several, a read without locks first settles how many
-- each span gives. Where rows held elsewhere were counted into that, a row 'short' says so, and a search that is
-- :unshared takes from each span what it can get.
-- The lease that begins an attempt gives the attempt its id. The row is found again by its ctid, which is safe as the
-- row is held: a version this statement cannot see is left for the next claim.
with clock as materialized (select ff_now() as now),
serving as materialized (
  select q.queue_no, l.lane_id
    from lane l
    join queue q using (lane_no)
    join capability_set c using (capability_set_no)
   where l.lane_id = any(:lanes::text[]) and l.state in ('active', 'draining') and c.required <@ :capabilities::text[]
),
span as materialized (
  select s.queue_no, s.lane_id, coalesce(w.first_place, 0) as first_place,
         coalesce(w.last_place, 9223372036854775807) as last_place
    from serving s
    left join unnest(:span_queues::int[], :span_firsts::bigint[], :span_lasts::bigint[])
              as w(queue_no, first_place, last_place) using (queue_no)
   order by 3
),
share as materialized (
  select queue_no, lane_id, first_place, last_place, :limit::bigint as rows
    from span where :unshared::boolean or (select count(*) from serving) = 1
  union all
  select queue_no, lane_id, first_place, last_place, count(*)
    from (select s.*
            from span s
           cross join lateral (
                 select e.place from execution e
                  where e.queue_no = s.queue_no and e.place between s.first_place and s.last_place
                    and (e.eligibility_state = 'eligible_now' or e.ownership_state in ('lease_expired_reclaimable', 'lease_revoked'))
                    and (e.granted_until is null or e.granted_until <= (select now from clock))
                    and e.blocking_reason <> 'paused_by_flow_cancel'
                  order by e.place limit :limit) e
           where not :unshared and (select count(*) from serving) > 1
           order by e.place limit :limit) best
   group by 1, 2, 3, 4
),
judged as materialized (
  select p.*, c.now, i.execution_kind, i.input_payload, i.payload_encoding, i.policy, i.has_tags,
         row_number() over () as nth,
         case
           when p.ownership_state = 'unowned' then
             case p.attempt_state when 'attempt_interrupted' then 'resumed' else 'fresh' end
           when p.reclaim_count >= case when i.policy is null then :reclaim_cap::int
                                        else coalesce((i.policy ->> 'max_reclaim_count')::int, :policy_reclaim_cap::int) end
             then 'capped'
           else 'reclaimed' end as branch,
         case when p.attempt_state = 'attempt_interrupted' and p.ownership_state = 'unowned'
           then p.remaining_attempt_timeout_ms
           else nullif((i.policy #>> '{timeout_policy,attempt_timeout_ms}')::bigint, 0) end as timeout_ms
    from (select s.lane_id, e.*
            from share s
           cross join lateral (
                 select e.ctid as tid, e.partition_key, e.execution_id, e.queue_no, e.place, e.priority, e.namespace_no,
                        e.lane_no, e.created_at, e.ownership_state, e.attempt_state, e.lease_epoch, e.lease_id, e.attempt_id,
                        e.attempt_type, e.attempt_count, e.worker_no, e.claimed_at, e.retry_count, e.reclaim_count, e.remaining_attempt_timeout_ms, e.flow_id,
                        e.instance_tag, e.previous_attempt_index, e.retry_reason, e.reclaim_reason, e.replay_reason,
                        e.replay_requested_by, e.attempt_policy, e.attempt_stored
                   from execution e
                  where e.queue_no = s.queue_no and e.place between s.first_place and s.last_place
                    and (e.eligibility_state = 'eligible_now' or e.ownership_state in ('lease_expired_reclaimable', 'lease_revoked'))
                    and (e.granted_until is null or e.granted_until <= (select now from clock))
                    and e.blocking_reason <> 'paused_by_flow_cancel'
                  order by e.place limit s.rows
                    for update skip locked) e
           limit :limit) p
   cross join lateral ff_input(p.namespace_no, p.lane_no, p.created_at, p.partition_key, p.execution_id) i
   cross join clock c
),
leased as (
  update execution e
     set lifecycle_phase = :to_phase, ownership_state = :to_ownership, eligibility_state = :to_eligibility,
         blocking_reason = :to_blocking, terminal_outcome = :to_outcome, attempt_state = :to_attempt,
         blocking_detail = null,
         lease_epoch = j.lease_epoch + 1, lease_id = (:lease_ids::uuid[])[j.nth], worker_no = :worker_no,
         claimed_at = j.now, lease_expires_at = j.now + :lease_ttl_ms::bigint, lease_renewed_at = null,
         granted_until = null, delay_until = null, remaining_attempt_timeout_ms = null,
         attempt_timeout_at = j.now + j.timeout_ms,
         attempt_id = case j.branch when 'resumed' then e.attempt_id else (:lease_ids)[j.nth] end,
         attempt_stored = j.branch = 'resumed',
         attempt_count = e.attempt_count + (j.branch <> 'resumed')::int,
         attempt_type = case
           when j.branch = 'resumed' then e.attempt_type
           when j.branch = 'reclaimed' then 'reclaim'
           when e.attempt_state = 'pending_retry_attempt' then 'retry'
           when e.attempt_state = 'pending_replay_attempt' then 'replay'
           else 'initial' end::attempt_type,
         reclaim_count = e.reclaim_count + (j.branch = 'reclaimed')::int,
         previous_attempt_index = case j.branch when 'reclaimed' then j.attempt_count - 1 else e.previous_attempt_index end,
         reclaim_reason = case j.branch when 'reclaimed' then 'lease_' || j.ownership_state when 'fresh' then null else e.reclaim_reason end,
         retry_reason = case j.branch when 'reclaimed' then null else e.retry_reason end,
         replay_reason = case j.branch when 'reclaimed' then null else e.replay_reason end,
         replay_requested_by = case j.branch when 'reclaimed' then null else e.replay_requested_by end,
         attempt_policy = case when j.branch <> 'reclaimed' then e.attempt_policy end,
         lease_expired_at = null, lease_revoked_at = null, lease_revoke_reason = null,
         started_at = coalesce(e.started_at, j.now), last_transition_at = j.now, last_mutation_at = j.now
    from judged j
   where e.ctid = j.tid and e.partition_key = j.partition_key and e.execution_id = j.execution_id and j.branch <> 'capped'
  returning j.nth, j.branch, j.partition_key, j.execution_id, j.queue_no, j.place, j.lane_id, j.priority, j.retry_count,
            e.lease_id, e.lease_epoch, e.attempt_id, e.attempt_type, e.attempt_count - 1 as attempt_index, j.now,
            j.execution_kind, j.input_payload, j.payload_encoding, j.policy, j.has_tags, j.timeout_ms,
            j.namespace_no, j.flow_id, j.instance_tag
),
interrupted as (
  insert into attempt (partition_key, execution_id, attempt_index, attempt_id, attempt_type, attempt_state,
                       started_at, ended_at, lease_id, lease_epoch, worker_no, failure_reason, previous_attempt_index,
                       retry_reason, reclaim_reason, replay_reason, replay_requested_by, policy)
  select partition_key, execution_id, attempt_count - 1, attempt_id, attempt_type, 'interrupted_reclaimed',
         claimed_at, now, lease_id, lease_epoch, worker_no, 'lease_' || ownership_state, previous_attempt_index,
         retry_reason, reclaim_reason, replay_reason, replay_requested_by, attempt_policy
    from judged where branch = 'reclaimed' and not attempt_stored and nth = any(array(select nth from leased))
),
-- An attempt that was parked before has its row already. Not an update: its join might be driven from the wrong side.
interrupted_again as (
  insert into attempt as a (partition_key, execution_id, attempt_index, attempt_id, attempt_type, attempt_state, started_at,
                            resumed_at, ended_at, lease_id, lease_epoch, worker_no, failure_reason)
  select partition_key, execution_id, attempt_count - 1, attempt_id, attempt_type, 'interrupted_reclaimed', claimed_at,
         claimed_at, now, lease_id, lease_epoch, worker_no, 'lease_' || ownership_state
    from judged where branch = 'reclaimed' and attempt_stored and nth = any(array(select nth from leased))
  on conflict (partition_key, execution_id, attempt_index) do update
     set attempt_state = excluded.attempt_state, resumed_at = excluded.resumed_at, ended_at = excluded.ended_at,
         lease_id = excluded.lease_id, lease_epoch = excluded.lease_epoch, worker_no = excluded.worker_no,
         failure_reason = excluded.failure_reason, suspension_marker = null, suspension_id = null
),
told as (
  insert into event (at, execution_id, partition_key, kind, namespace_no, attempt_index, worker_no, lease_epoch, lease_id,
                     attempt_id, reason, flow_id, instance_tag)
  select now, execution_id, partition_key, case branch when 'reclaimed' then 6 else 1 end, namespace_no,
         attempt_index, :worker_no, lease_epoch, lease_id, nullif(attempt_id, lease_id), case branch when 'resumed' then 'claim_resumed' end,
         flow_id, instance_tag
    from leased
)
select branch, partition_key, execution_id, queue_no, place, lane_id, priority, retry_count,
       lease_id, lease_epoch, attempt_id, attempt_type, attempt_index, now,
       execution_kind, input_payload, payload_encoding, policy,
       case when has_tags then (
         select jsonb_object_agg(t.key, t.value) from execution_tag t
          where t.partition_key = l.partition_key and t.execution_id = l.execution_id) end as tags, timeout_ms
  from leased l
union all
select branch, partition_key, execution_id, queue_no, place, lane_id, priority, retry_count,
       null, lease_epoch, null, null, null, now, null, null, null, null, null, null
  from judged where branch = 'capped'
union all
select 'short', null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null
 where not :unshared and (select count(*) from serving) > 1 and (select sum(rows) from share) > (select count(*) from judged);

-- name: lease_held
-- Leases one execution that the transaction holds and has judged; it leaves what claim_best leaves.
with clock as materialized (select ff_now() as now),
held as materialized (
  select e.partition_key, e.execution_id, e.queue_no, e.place, e.priority, e.namespace_no, e.ownership_state, e.attempt_state,
         e.lease_epoch, e.lease_id, e.attempt_id, e.attempt_type, e.attempt_count, e.worker_no, e.claimed_at, e.retry_count,
         e.flow_id, e.instance_tag, e.previous_attempt_index, e.retry_reason, e.reclaim_reason, e.replay_reason,
         e.replay_requested_by, e.attempt_policy, e.attempt_stored, l.lane_id, c.now, :branch::text as branch,
         i.execution_kind, i.input_payload, i.payload_encoding, i.policy, i.has_tags
    from execution e
   cross join lateral ff_input(e.namespace_no, e.lane_no, e.created_at, e.partition_key, e.execution_id) i
    join lane l on l.lane_no = e.lane_no
   cross join clock c
   where e.partition_key = :partition_key and e.execution_id = :execution_id
),
leased as (
  update execution e
     set lifecycle_phase = :to_phase, ownership_state = :to_ownership, eligibility_state = :to_eligibility,
         blocking_reason = :to_blocking, terminal_outcome = :to_outcome, attempt_state = :to_attempt,
         blocking_detail = null,
         lease_epoch = h.lease_epoch + 1, lease_id = :lease_id, worker_no = :worker_no,
         claimed_at = h.now, lease_expires_at = h.now + :lease_ttl_ms::bigint, lease_renewed_at = null,
         granted_until = null, delay_until = null, remaining_attempt_timeout_ms = null,
         deadline_at = coalesce(:deadline_at::bigint, e.deadline_at),
         attempt_timeout_at = h.now + :timeout_ms::bigint,
         attempt_id = case h.branch when 'resumed' then e.attempt_id else :attempt_id::uuid end,
         attempt_stored = h.branch = 'resumed',
         attempt_count = e.attempt_count + (h.branch <> 'resumed')::int,
         attempt_type = case
           when h.branch = 'resumed' then e.attempt_type
           when h.branch = 'reclaimed' then 'reclaim'
           when e.attempt_state = 'pending_retry_attempt' then 'retry'
           when e.attempt_state = 'pending_replay_attempt' then 'replay'
           else 'initial' end::attempt_type,
         reclaim_count = e.reclaim_count + (h.branch = 'reclaimed')::int,
         previous_attempt_index = case h.branch when 'reclaimed' then h.attempt_count - 1 else e.previous_attempt_index end,
         reclaim_reason = case h.branch when 'reclaimed' then 'lease_' || h.ownership_state when 'fresh' then null else e.reclaim_reason end,
         retry_reason = case h.branch when 'reclaimed' then null else e.retry_reason end,
         replay_reason = case h.branch when 'reclaimed' then null else e.replay_reason end,
         replay_requested_by = case h.branch when 'reclaimed' then null else e.replay_requested_by end,
         attempt_policy = case h.branch
           when 'resumed' then e.attempt_policy
           when 'reclaimed' then :attempt_policy::jsonb
           else coalesce(:attempt_policy, e.attempt_policy) end,
         lease_expired_at = null, lease_revoked_at = null, lease_revoke_reason = null,
         started_at = coalesce(e.started_at, h.now), last_transition_at = h.now, last_mutation_at = h.now
    from held h
   where e.partition_key = h.partition_key and e.execution_id = h.execution_id
  returning e.partition_key, e.execution_id, e.lease_id, e.lease_epoch, e.attempt_id, e.attempt_type,
            e.attempt_count - 1 as attempt_index
),
consumed as (
  delete from claim_grant where partition_key = :partition_key and execution_id = :execution_id
),
interrupted as (
  insert into attempt (partition_key, execution_id, attempt_index, attempt_id, attempt_type, attempt_state,
                       started_at, ended_at, lease_id, lease_epoch, worker_no, failure_reason, previous_attempt_index,
                       retry_reason, reclaim_reason, replay_reason, replay_requested_by, policy)
  select partition_key, execution_id, attempt_count - 1, attempt_id, attempt_type, 'interrupted_reclaimed',
         claimed_at, now, lease_id, lease_epoch, worker_no, 'lease_' || ownership_state, previous_attempt_index,
         retry_reason, reclaim_reason, replay_reason, replay_requested_by, attempt_policy
    from held where branch = 'reclaimed' and not attempt_stored
),
-- An attempt that was parked before has its row already. Not an update: its join might be driven from the wrong side.
interrupted_again as (
  insert into attempt as a (partition_key, execution_id, attempt_index, attempt_id, attempt_type, attempt_state, started_at,
                            resumed_at, ended_at, lease_id, lease_epoch, worker_no, failure_reason)
  select partition_key, execution_id, attempt_count - 1, attempt_id, attempt_type, 'interrupted_reclaimed', claimed_at,
         claimed_at, now, lease_id, lease_epoch, worker_no, 'lease_' || ownership_state
    from held where branch = 'reclaimed' and attempt_stored
  on conflict (partition_key, execution_id, attempt_index) do update
     set attempt_state = excluded.attempt_state, resumed_at = excluded.resumed_at, ended_at = excluded.ended_at,
         lease_id = excluded.lease_id, lease_epoch = excluded.lease_epoch, worker_no = excluded.worker_no,
         failure_reason = excluded.failure_reason, suspension_marker = null, suspension_id = null
),
told as (
  insert into event (at, execution_id, partition_key, kind, namespace_no, attempt_index, worker_no, lease_epoch, lease_id,
                     attempt_id, reason, flow_id, instance_tag)
  select h.now, h.execution_id, h.partition_key, case h.branch when 'reclaimed' then 6 else 1 end, h.namespace_no,
         l.attempt_index, :worker_no, l.lease_epoch, l.lease_id, nullif(l.attempt_id, l.lease_id), :reason, h.flow_id, h.instance_tag
    from held h join leased l using (partition_key, execution_id)
)
select h.branch, h.partition_key, h.execution_id, h.queue_no, h.place, h.lane_id, h.priority, h.retry_count,
       l.lease_id, l.lease_epoch, l.attempt_id, l.attempt_type, l.attempt_index, h.now,
       h.execution_kind, h.input_payload, h.payload_encoding, h.policy,
       case when h.has_tags then (
         select jsonb_object_agg(t.key, t.value) from execution_tag t
          where t.partition_key = h.partition_key and t.execution_id = h.execution_id) end as tags,
       :timeout_ms as timeout_ms
  from held h join leased l using (partition_key, execution_id);
