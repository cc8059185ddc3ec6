-- name: claim_best
-- Leases the best claimable executions of the queues this worker may serve, at most :limit; each queue's come in order.
-- firsts, lasts: where to walk a queue whose head is known to be spent; without watermarks it is walked whole. With one queue
-- the walk is lazy, so :limit bounds the rows it locks. With several, reads without locks first settle how many rows each
-- queue gives and up to which place:
--   head     the first row of each queue, of which the best :limit matter
--   sample   as many rows of each as suffice where the work is spread evenly; the :limit-th best of them is a bound
--   known    up to that bound more rows of the queues whose sample ends below it
--   share    what is up to the cut: the :limit-th best known row, or before that the end of what is known of a queue
-- The last row may be a note: 'more' says that such an end came first, 'short' that rows held elsewhere were counted in,
-- where a search that is :unshared takes from each queue what it can get. After a walk without watermarks there always is a
-- note, 'whole' if nothing else, and its timeout_ms is the time of the walk: without the commit and without the network.
-- The lease that begins an attempt gives the attempt its id. The row is found again by its ctid, which is safe as the
-- row is held: a version this statement cannot see is left for the next claim. An offset of 0 keeps the planner from
-- putting an expression wherever its value is used, to be computed anew each time.
with clock as materialized (select ff_now() as now),
-- The spans of a queue stand next to each other, and the queues in the order of their numbers.
serving as materialized (
  select q.queue_no, q.lane_id,
         case when q.low < q.high then (:span_firsts::bigint[])[q.low + 1 : q.high] else '{0}' end as firsts,
         case when q.low < q.high then (:span_lasts::bigint[])[q.low + 1 : q.high] else '{9223372036854775807}' end as lasts
    from (select q.queue_no, l.lane_id, width_bucket(q.queue_no - 1, :span_queues::int[]) as low,
                 width_bucket(q.queue_no, :span_queues) as high
            from lane l
           cross join lateral (
                 select q.queue_no, q.namespace_no, q.capability_set_no from queue q
                  where q.lane_no = l.lane_no and :kind_nos::int[] is null
                 union all
                 select q.queue_no, q.namespace_no, q.capability_set_no from queue q
                  where q.lane_no = l.lane_no and q.kind_no = any(:kind_nos)) q
            join capability_set c using (capability_set_no)
           where l.lane_id = any(:lanes::text[]) and l.state in ('active', 'draining') and c.required <@ :capabilities::text[]
             and (:namespace_no::int is null or q.namespace_no = :namespace_no) offset 0) q
),
head as materialized (
  select s.queue_no, s.lane_id, s.firsts, s.lasts, e.place
    from serving s
   cross join lateral (
         select e.place
           from (select unnest(s.firsts) as first_place, unnest(s.lasts) as last_place) w
          cross join lateral (
                select e.place from execution e
                 where e.queue_no = s.queue_no and e.place between w.first_place and w.last_place
                   and (e.eligibility_state = 'eligible_now' or e.ownership_state in ('lease_expired_reclaimable', 'lease_revoked'))
                   and (e.granted_until is null or e.granted_until <= (select now from clock))
                   and e.blocking_reason <> 'paused_by_flow_cancel'
                 order by e.place limit 1) e
          limit 1) e
   where (select count(*) from serving) > 1
   order by e.place
   limit case when not :unshared::boolean then :limit::bigint end
),
-- With more than one row wanted of the only queue that has any, nothing needs to be shared.
plan as materialized (
  select n > 1 or (n = 1 and :limit = 1) as is_shared, least(1 + 2 * :limit / greatest(n, 1), :limit) as size
    from (select case when :unshared then 0 else count(*) end as n from head) h
),
sample as materialized (
  select h.queue_no, h.lane_id, h.firsts, h.lasts, h.place,
         array(select e.place
                 from (select unnest(h.firsts) as first_place, unnest(h.lasts) as last_place) w
                cross join lateral (
                      select e.place from execution e
                       where e.queue_no = h.queue_no and e.place between greatest(w.first_place, h.place) and w.last_place
                         and (e.eligibility_state = 'eligible_now' or e.ownership_state in ('lease_expired_reclaimable', 'lease_revoked'))
                         and (e.granted_until is null or e.granted_until <= (select now from clock))
                         and e.blocking_reason <> 'paused_by_flow_cancel'
                       order by e.place limit p.size) e
                limit p.size) as places
    from plan p cross join head h
   where p.is_shared
),
bound as materialized (
  select b.place, p.size,
         1 + 2 * :limit / greatest((select count(*) from sample s where s.places[p.size] < b.place), 1) as more
    from plan p
   cross join (select coalesce((select found from sample s cross join unnest(s.places) as found
                                 order by found offset :limit - 1 limit 1), 9223372036854775807) as place offset 0) b
),
known as materialized (
  select s.queue_no, s.lane_id, s.firsts, s.lasts, s.place,
         s.places || array(
           select e.place
             from (select unnest(s.firsts) as first_place, unnest(s.lasts) as last_place) w
            cross join lateral (
                  select e.place from execution e
                   where e.queue_no = s.queue_no
                     and e.place between greatest(w.first_place, s.places[b.size] + 1) and least(w.last_place, b.place)
                     and (e.eligibility_state = 'eligible_now' or e.ownership_state in ('lease_expired_reclaimable', 'lease_revoked'))
                     and (e.granted_until is null or e.granted_until <= (select now from clock))
                     and e.blocking_reason <> 'paused_by_flow_cancel'
                   order by e.place limit b.more) e
            where s.places[b.size] < b.place
            limit b.more) as places
    from bound b cross join sample s
),
cut as materialized (
  select k.limited, k.known, least(k.limited, k.known) as place
    from (select coalesce((select found from known k cross join unnest(k.places) as found
                            order by found offset :limit - 1 limit 1), 9223372036854775807) as limited,
                 (select min(k.places[b.size + b.more]) from bound b cross join known k) as known offset 0) k
),
share as materialized (
  select queue_no, lane_id, firsts, lasts, 0 as first_place, 9223372036854775807 as last_place, :limit as rows
    from serving where (select count(*) from serving) = 1
  union all
  select queue_no, lane_id, firsts, lasts, place, 9223372036854775807, :limit
    from head where not (select is_shared from plan)
  union all
  select k.queue_no, k.lane_id, k.firsts, k.lasts, k.place, c.place, (select count(*) from unnest(k.places) as found where found <= c.place)
    from cut c cross join known k
   where k.place <= c.place
),
judged as materialized (
  select p.*, c.now, i.execution_kind, i.input_payload, i.payload_encoding, i.policy, i.has_tags,
         row_number() over () as nth,
         case
           when p.ownership_state = 'unowned' then
             case p.attempt_state when 'attempt_interrupted' then 'resumed' else 'fresh' end
           when p.reclaim_count >= case when i.policy is null then :reclaim_cap::int
                                        else coalesce((i.policy ->> 'max_reclaim_count')::int, :policy_reclaim_cap::int) end
             then 'reclaim_limit'
           else 'reclaimed' end as branch,
         case when p.attempt_state = 'attempt_interrupted' and p.ownership_state = 'unowned'
           then p.remaining_attempt_timeout_ms
           else nullif((i.policy #>> '{timeout_policy,attempt_timeout_ms}')::bigint, 0) end as timeout_ms
    from (select s.lane_id, e.*
            from share s
           cross join lateral (
                 select e.*
                   from (select unnest(s.firsts) as first_place, unnest(s.lasts) as last_place) w
                  cross join lateral (
                        select e.ctid as tid, e.partition_key, e.execution_id, e.queue_no, e.place, e.priority, e.namespace_no,
                               e.lane_no, e.created_at, e.ownership_state, e.attempt_state, e.lease_epoch, e.lease_id,
                               e.attempt_id,
                               e.attempt_type, e.attempt_count, e.worker_no, e.claimed_at, e.retry_count, e.reclaim_count,
                               e.remaining_attempt_timeout_ms, e.deadline_at, e.flow_id,
                               e.instance_tag, e.previous_attempt_index, e.retry_reason, e.reclaim_reason, e.replay_reason,
                               e.replay_requested_by, e.attempt_policy, e.attempt_stored
                          from execution e
                         where e.queue_no = s.queue_no
                           and e.place between greatest(w.first_place, s.first_place) and least(w.last_place, s.last_place)
                           and (e.eligibility_state = 'eligible_now' or e.ownership_state in ('lease_expired_reclaimable', 'lease_revoked'))
                           and (e.granted_until is null or e.granted_until <= (select now from clock))
                           and e.blocking_reason <> 'paused_by_flow_cancel'
                         order by e.place limit s.rows
                           for update skip locked) e
                  limit s.rows) e
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
   where e.ctid = j.tid and e.partition_key = j.partition_key and e.execution_id = j.execution_id and j.branch <> 'reclaim_limit'
  returning j.nth, j.branch, j.partition_key, j.execution_id, j.queue_no, j.place, j.lane_id, j.priority, j.retry_count,
            e.lease_id, e.lease_epoch, e.attempt_id, e.attempt_type, e.attempt_count - 1 as attempt_index, j.now,
            j.execution_kind, j.input_payload, j.payload_encoding, j.policy, j.has_tags, j.timeout_ms,
            j.deadline_at, j.namespace_no, j.flow_id, j.instance_tag
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
events as (
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
          where t.partition_key = l.partition_key and t.execution_id = l.execution_id) end as tags, timeout_ms, deadline_at
  from leased l
union all
select branch, partition_key, execution_id, queue_no, place, lane_id, priority, retry_count,
       null, lease_epoch, null, null, null, now, null, null, null, null, null, null, null
  from judged where branch = 'reclaim_limit'
union all
select case when is_short then 'short' when is_more then 'more' else 'whole' end, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null,
       case when cardinality(:span_queues) = 0
         then (extract(epoch from clock_timestamp() - statement_timestamp()) * 1000)::bigint end, null
  from (select is_shared and (select sum(rows) from share) > (select count(*) from judged) as is_short,
               is_shared and (select known < limited from cut) as is_more
          from plan) s
 where is_short or is_more or cardinality(:span_queues) = 0;

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
            e.attempt_count - 1 as attempt_index, e.deadline_at
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
events as (
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
       :timeout_ms as timeout_ms, l.deadline_at
  from held h join leased l using (partition_key, execution_id);
