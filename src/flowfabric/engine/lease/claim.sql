-- fragment: routes
-- The sources of a scan by route. serving: the routes that this worker may serve. entry: the rows of ready. wanted: the queues of
-- these routes that match the kinds and the namespace of the claim; empty if it names neither.
serving as materialized (
  select r.route_no as source_no
    from lane l join route r using (lane_no) join capability_set c using (capability_set_no)
   where l.lane_id = any(:lanes::text[]) and l.state in ('active', 'draining') and c.required <@ :capabilities::text[]
),
entry as not materialized (select r.*, r.route_no as source_no, r.ctid as tid from ready r),
wanted as materialized (
  select q.queue_no
    from serving s
   cross join lateral (
         select q.queue_no, q.namespace_no, q.route_no from queue q join route r using (route_no)
          where :is_filtered and r.route_no = s.source_no and q.lane_no = r.lane_no
            and (:kind_nos::int[] is null or q.kind_no in (select unnest(:kind_nos)))) q
   where :namespace_no::int is null or q.namespace_no = :namespace_no
)

-- fragment: queues
-- The sources of a scan by queue. serving: the queues that this worker may serve and that match the kinds and the namespace.
serving as materialized (
  select q.queue_no as source_no
    from lane l
    join route r using (lane_no)
    join capability_set c using (capability_set_no)
    join queue q on q.lane_no = l.lane_no and q.route_no = r.route_no
   where l.lane_id = any(:lanes::text[]) and l.state in ('active', 'draining') and c.required <@ :capabilities::text[]
     and (:kind_nos::int[] is null or q.kind_no in (select unnest(:kind_nos)))
     and (:namespace_no::int is null or q.namespace_no = :namespace_no)
),
entry as not materialized (select r.*, r.queue_no as source_no, r.ctid as tid from ready r),
wanted as materialized (select source_no as queue_no from serving where :is_filtered::boolean)

-- fragment: scan
-- The entries of the served routes or queues (the sources of the scan) in the order of their places, best first. A span is a range
-- of places of one source. A source has the spans that the caller gives for it (what its watermarks leave to read), or else one
-- span with all places. :span_sources is sorted, so width_bucket finds the spans low + 1 to high of a source by binary search.
-- Up to eight spans are read, each by an ordered index scan, and merged lazily: entries beyond the limit are not read. If there
-- are more spans, the eight whose first entries are best are read, up to the first entry of the ninth span.
span as materialized (
  select s.source_no, greatest(w.first_place, :scanned_to::bigint) as first_place, w.last_place
    from (select source_no, width_bucket(source_no - 1, :span_sources::int[]) as low, width_bucket(source_no, :span_sources) as high from serving) s
   cross join lateral unnest(
         case when s.low < s.high then (:span_firsts::bigint[])[s.low + 1 : s.high] else '{0}' end,
         case when s.low < s.high then (:span_lasts::bigint[])[s.low + 1 : s.high] else '{9223372036854775807}' end)
         as w(first_place, last_place)
   where w.last_place >= :scanned_to
),
chosen as materialized (
  select s.source_no, s.first_place, s.last_place, null::bigint as ninth from span s where (select count(*) from span) <= 8
  union all
  (select h.source_no, h.first_place, least(h.last_place, h.ninth - 1), h.ninth
     from (select s.source_no, r.place as first_place, s.last_place,
                  nth_value(r.place, 9) over (order by r.place rows between unbounded preceding and unbounded following) as ninth
             from span s
            cross join lateral (
                  select r.place from entry r
                   where r.source_no = s.source_no and r.place between s.first_place and s.last_place
                   order by r.place limit 1) r
            where (select count(*) from span) > 8) h
    order by h.first_place limit 8)
),
scan as not materialized (
  select r.*
    from (select array_agg(source_no) as nos, array_agg(first_place) as firsts, array_agg(last_place) as lasts from chosen) w
   cross join lateral (
         select * from (
             (select * from entry where source_no = w.nos[1] and place between w.firsts[1] and w.lasts[1] order by place offset 0)
             union all
             (select * from entry where source_no = w.nos[2] and place between w.firsts[2] and w.lasts[2] order by place offset 0)
             union all
             (select * from entry where source_no = w.nos[3] and place between w.firsts[3] and w.lasts[3] order by place offset 0)
             union all
             (select * from entry where source_no = w.nos[4] and place between w.firsts[4] and w.lasts[4] order by place offset 0)
             union all
             (select * from entry where source_no = w.nos[5] and place between w.firsts[5] and w.lasts[5] order by place offset 0)
             union all
             (select * from entry where source_no = w.nos[6] and place between w.firsts[6] and w.lasts[6] order by place offset 0)
             union all
             (select * from entry where source_no = w.nos[7] and place between w.firsts[7] and w.lasts[7] order by place offset 0)
             union all
             (select * from entry where source_no = w.nos[8] and place between w.firsts[8] and w.lasts[8] order by place offset 0)
         ) spans order by place) r
)

-- fragment: branch
-- How a claimable execution is leased: for the first time or again, resumed, reclaimed, or not at all.
case
  when e.ownership_state = 'unowned' then case e.attempt_state when 'attempt_interrupted' then 'resumed' else 'fresh' end
  when e.reclaim_count >= case when e.policy is null then :reclaim_limit::int
                               else coalesce((e.policy ->> 'max_reclaim_count')::int, :policy_reclaim_limit::int) end
    then 'reclaim_limit'
  else 'reclaimed' end as branch

-- fragment: picked
-- Locks the best claimable executions of a scan; returns for each how it is leased (branch) and how long its attempt may run. The
-- entry is locked before the execution: if another claim has removed the entry since the statement began, it is skipped without
-- locking the execution, which would block the worker that completes it. The bits of attached: 1 is a grant, 4 a stream.
picked as materialized (
  select r.route_no, r.tid as ready_tid, e.*, row_number() over () as nth
    from scan r
   cross join lateral (select from ready l where l.ctid = r.tid for update skip locked) l
   cross join lateral (
         select e.ctid as tid, e.partition_key, e.execution_id, e.queue_no, e.place, e.lease_epoch,
                -- include: branch
                ,
                case when e.attempt_state = 'attempt_interrupted' and e.ownership_state = 'unowned' then 'claim_resumed' end as reason,
                case when e.attempt_state = 'attempt_interrupted' and e.ownership_state = 'unowned'
                  then e.remaining_attempt_timeout_ms
                  else nullif((e.policy #>> '{timeout_policy,attempt_timeout_ms}')::bigint, 0) end as timeout_ms,
                e.attempt_timeout_at is not null as had_timeout, e.attached & 1 <> 0 as was_granted, e.attached & 4 <> 0 as had_stream,
                null::uuid as given_attempt_id, null::jsonb as given_policy, null::bigint as given_deadline_at,
                case when e.granted_until is not null then e.slot_keys end as given_slot_keys, false as was_blocked
           from execution e
          where e.partition_key = r.partition_key and e.execution_id = r.execution_id
            and (e.eligibility_state = 'eligible_now' or e.ownership_state in ('lease_expired_reclaimable', 'lease_revoked'))
            -- Checked on the locked row too: the entry may have been read before a grant was stored.
            and (e.granted_until is null or e.granted_until <= (select now from clock))
            for update skip locked) e
   where (r.granted_until is null or r.granted_until <= (select now from clock))
     and (not :is_filtered::boolean or r.queue_no in (select queue_no from wanted))
     and r.execution_id <> all(:skipped::uuid[])
   limit :limit
)

-- fragment: notes
-- Rows that are not leases: executions at their reclaim limit, executions that are not leased because their timeout is too short
-- to wait for a slot ('too_short'), and at most one note about the scan, as the last row. The note is 'cut_short' if there are
-- spans that were not read: deadline_at is the place where the next statement continues. After a full scan there is always a
-- note, 'cut_short' or 'finished': timeout_ms is the time that the scan took on the server, in microseconds.
select case branch when 'reclaim_limit' then branch else 'too_short' end, partition_key, execution_id, route_no, queue_no, place, null, null,
       null, lease_epoch, null, null, null, null, null, null, null, null, null, null::bigint, null::bigint
  from picked where branch = 'reclaim_limit' or (nth > :slots and timeout_ms < :least_ahead_ms)
union all
select case when is_cut_short then 'cut_short' else 'finished' end, null, null, null, null, null, null, null, null, null, null, null, null, null,
       null, null, null, null, null,
       case when cardinality(:span_sources) = 0
         then (extract(epoch from clock_timestamp() - statement_timestamp()) * 1000000)::bigint end, case when is_cut_short then ninth end
  from (select c.ninth, c.ninth is not null and (select count(*) from picked) < :limit as is_cut_short
          from (select max(ninth) as ninth from chosen) c) s
 where is_cut_short or cardinality(:span_sources) = 0

-- fragment: leased
-- Leases the picked executions: begins or resumes the attempt, deletes the ready entry, and writes the claim, the attempt that
-- a reclaim interrupts, the timers and the event. Rows are found again by ctid: if a row changed since the statement began, the
-- lock is on a newer version that the statement does not see, and the execution and its entry are left for the next claim.
leased as (
  update execution e
     set lifecycle_phase = :to_phase, ownership_state = :to_ownership, eligibility_state = :to_eligibility,
         blocking_reason = :to_blocking, terminal_outcome = :to_outcome, attempt_state = :to_attempt,
         lease_epoch = e.lease_epoch + 1, claim_no = (select claim_no from clock), claimed_at = (select now from clock),
         lease_expires_at = (select now + :lease_ttl_ms::bigint from clock), lease_id = (:lease_ids::uuid[])[p.nth],
         attempt_id = case p.branch when 'resumed' then coalesce(e.attempt_id, e.lease_id) else p.given_attempt_id end,
         worker_no = :worker_no,
         attempt_type = case
           when p.branch = 'resumed' then e.attempt_type
           when p.branch = 'reclaimed' then 'reclaim'
           when e.attempt_state = 'pending_retry_attempt' then 'retry'
           when e.attempt_state = 'pending_replay_attempt' then 'replay'
           else 'initial' end::attempt_type,
         attempt_count = e.attempt_count + (p.branch <> 'resumed')::int,
         reclaim_count = e.reclaim_count + (p.branch = 'reclaimed')::int,
         attached = (e.attached & case p.branch when 'resumed' then ~9 else ~13 end) | case when p.given_slot_keys is null then 0 else 8 end,
         slot_keys = p.given_slot_keys,
         last_transition_at = (select now from clock), last_mutation_at = null,
         started_at = case when e.attempt_count > 0 then coalesce(e.started_at, e.claimed_at) end,
         granted_until = null, delay_until = null, remaining_attempt_timeout_ms = null, blocking_detail = null,
         failure_reason = null, failure_category = null,
         attempt_timeout_at = (select now from clock) + p.timeout_ms, deadline_at = coalesce(p.given_deadline_at, e.deadline_at),
         lease_renewed_at = null, lease_expired_at = null, lease_revoked_at = null, lease_revoke_reason = null
    from picked p
   where e.ctid = p.tid and p.branch <> 'reclaim_limit'
     -- The attempt's time runs from the claim: an attempt with a short timeout is not leased before a slot is free.
     and (p.nth <= :slots::int or p.timeout_ms is null or p.timeout_ms >= :least_ahead_ms::bigint)
  returning p.nth, p.tid, p.ready_tid, p.route_no, p.branch, p.reason, p.timeout_ms, p.had_timeout, p.was_granted, p.had_stream, p.was_blocked,
            p.given_policy, p.given_deadline_at, e.partition_key, e.execution_id, e.queue_no, e.place, e.namespace_no, e.retry_count, e.lease_id,
            e.lease_epoch, e.attempt_id, e.attempt_type, e.attempt_count, e.deadline_at, e.flow_id, e.instance_tag,
            e.input_payload, e.payload_encoding, e.policy, e.suspension_id,
            case when e.has_tags then (
              select jsonb_object_agg(t.key, t.value) from execution_tag t
               where t.partition_key = e.partition_key and t.execution_id = e.execution_id) end as tags
),
deleted_entries as (
  delete from ready where ctid = any(array(select ready_tid from leased))
),
inserted_claims as (
  insert into claim (partition_key, claim_no, worker_no, expires_at, execution_ids)
  select partition_key, (select claim_no from clock), :worker_no, (select now + :lease_ttl_ms from clock), array_agg(execution_id)
    from leased group by partition_key
),
-- The interrupted attempt of a reclaim, and what is known of the new attempt. Here `execution` still has the values from before
-- the update.
written_attempts as (
  insert into attempt as a (partition_key, execution_id, attempt_index, attempt_state, attempt_id, attempt_type, started_at,
                            ended_at, lease_id, lease_epoch, worker_no, failure_reason, previous_attempt_index, reclaim_reason, policy)
  select e.partition_key, e.execution_id, e.attempt_count - 1, 'interrupted_reclaimed'::attempt_lifecycle,
         coalesce(e.attempt_id, e.lease_id), e.attempt_type, e.claimed_at, (select now from clock), e.lease_id, e.lease_epoch,
         e.worker_no, 'lease_' || e.ownership_state, null, null, null
    from leased l join execution e on e.ctid = l.tid
   where l.branch = 'reclaimed'
  union all
  select e.partition_key, e.execution_id, e.attempt_count, 'created', null, null, null, null, null, null, null, null,
         case l.branch when 'reclaimed' then e.attempt_count - 1 end,
         case l.branch when 'reclaimed' then 'lease_' || e.ownership_state end, l.given_policy
    from leased l join execution e on e.ctid = l.tid
   where l.branch = 'reclaimed' or (l.branch = 'fresh' and l.given_policy is not null)
  on conflict (partition_key, execution_id, attempt_index) do update
     set attempt_state = excluded.attempt_state, attempt_id = excluded.attempt_id, attempt_type = excluded.attempt_type,
         resumed_at = case when a.suspended_at is not null then excluded.started_at end,
         started_at = coalesce(a.started_at, excluded.started_at), ended_at = excluded.ended_at,
         lease_id = excluded.lease_id, lease_epoch = excluded.lease_epoch, worker_no = excluded.worker_no,
         failure_reason = excluded.failure_reason, suspension_marker = null, suspension_id = null,
         policy = coalesce(excluded.policy, a.policy)
),
deleted_grants as (
  delete from claim_grant g using leased l
   where l.was_granted and g.partition_key = any(array[l.partition_key]) and g.execution_id = l.execution_id
),
-- The stream of an interrupted attempt was closed when its lease was marked as expired, or at the latest now. A stream that an
-- append has locked, or has changed since the statement began, is left as it is: readers get the reason from the attempt.
closed_streams as (
  update stream s
     set (released_epoch, closed_at, closed_reason, expires_at, sweep_at) = (
           select * from ff_ended_stream(s, l.lease_epoch - 1, 'reclaimed', (select now from clock)))
    from leased l
   cross join lateral (
         select s.ctid as tid from stream s
          where s.partition_key = l.partition_key and s.execution_id = l.execution_id and s.attempt_index = l.attempt_count - 2
            for update skip locked) o
   where l.had_stream and l.branch = 'reclaimed' and s.ctid = o.tid
),
deleted_listings as (
  delete from listed i using leased l
   where (l.branch <> 'fresh' or l.was_blocked) and i.partition_key = any(array[l.partition_key]) and i.execution_id = l.execution_id
),
-- The kind is compared as text: with a plain equality, a plan made while the table is small would scan all of timer_due.
deleted_timers as (
  delete from timer t using leased l
   where l.had_timeout and l.timeout_ms is null
     and t.partition_key = any(array[l.partition_key]) and t.execution_id = l.execution_id and t.kind::text = 'attempt_timeout'
),
written_timers as (
  insert into timer (partition_key, execution_id, kind, due_at)
  select partition_key, execution_id, 'attempt_timeout'::timer_kind, (select now from clock) + timeout_ms from leased
   where timeout_ms is not null
  union all
  select partition_key, execution_id, 'deadline', greatest(given_deadline_at, (select now from clock)) from leased
   where given_deadline_at is not null
  on conflict (partition_key, execution_id, kind) do update set due_at = excluded.due_at
),
-- Leases that differ only in the ids of execution and lease share one event row.
inserted_events as (
  insert into event (at, partition_key, kind, namespace_no, attempt_index, worker_no, lease_epoch, execution_ids, lease_ids,
                     execution_id, lease_id, attempt_id, reason, flow_id, instance_tag, tags)
  select (select now from clock), partition_key, 'acquired'::event_kind, namespace_no, attempt_count - 1, :worker_no, lease_epoch,
         array_agg(execution_id), array_agg(lease_id), null, null, null, null, flow_id, instance_tag, tags
    from leased where branch = 'fresh' and reason is null and attempt_id is null
   group by partition_key, namespace_no, attempt_count, lease_epoch, flow_id, instance_tag, tags
  union all
  select (select now from clock), partition_key, (case branch when 'reclaimed' then 'reclaimed' else 'acquired' end)::event_kind,
         namespace_no, attempt_count - 1, :worker_no, lease_epoch, null, null, execution_id, lease_id,
         nullif(attempt_id, lease_id), reason, flow_id, instance_tag, tags
    from leased
   where branch <> 'fresh' or reason is not null or attempt_id is not null
)

-- fragment: answer
-- What a worker gets for each lease; lane and kind are null for queues that it has cached, which are all with :knows_queues. The branch of a resumed attempt is
-- 'parked' if it gave up its lease in another way than by a suspension. The suspension is looked up by a scalar subquery, because
-- the planner would hash the whole table for an "exists".
select case when branch = 'resumed' and (
              select s.attempt_index from suspension s
               where s.partition_key = l.partition_key and s.execution_id = l.execution_id and s.suspension_id = l.suspension_id
              ) is distinct from l.attempt_count - 1
         then 'parked' else branch end as branch, partition_key, execution_id, route_no, queue_no, place,
       case when not :knows_queues::boolean and queue_no <> all(:known_queues::int[]) then (
         select a.lane_id from queue q join lane a using (lane_no) where q.queue_no = l.queue_no) end as lane_id, retry_count,
       lease_id, lease_epoch, attempt_id, attempt_type, attempt_count - 1 as attempt_index, (select now from clock) as now,
       case when not :knows_queues and queue_no <> all(:known_queues) then (
         select k.execution_kind from queue q join kind k using (kind_no) where q.queue_no = l.queue_no) end as execution_kind,
       coalesce(input_payload, (
         select i.input_payload from execution_input i
          where i.partition_key = l.partition_key and i.execution_id = l.execution_id)) as input_payload, payload_encoding, policy, tags, timeout_ms, deadline_at
  from leased l

-- fragment: best
-- The picked execution, or one row of nulls; with the place at which the scan was cut short (cut_at) and, after a full scan, the
-- time that it took on the server in microseconds (scan_us).
select p.partition_key, p.execution_id, p.route_no, p.queue_no, p.place,
       case when cardinality(:span_sources) = 0
         then (extract(epoch from clock_timestamp() - statement_timestamp()) * 1000000)::bigint end as scan_us,
       (select max(ninth) from chosen) as cut_at
  from (values (true)) as one_row left join picked p on true

-- name: claim_by_route
-- Leases up to :limit of the best claimable executions of the routes this worker may serve, in order.
with clock as materialized (select ff_now() as now, nextval('claim_sequence') as claim_no),
-- include: routes
,
-- include: scan
,
-- include: picked
,
-- include: leased
-- include: answer
union all
-- include: notes
;

-- name: claim_by_queue
-- As claim_by_route, but scans only the wanted queues, for a worker that wants few of many.
with clock as materialized (select ff_now() as now, nextval('claim_sequence') as claim_no),
-- include: queues
,
-- include: scan
,
-- include: picked
,
-- include: leased
-- include: answer
union all
-- include: notes
;

-- name: lease_locked
-- Leases one execution that the transaction already holds locked and has checked; writes the same rows as claim_by_route.
with clock as materialized (select ff_now() as now, nextval('claim_sequence') as claim_no),
picked as materialized (
  select r.route_no, r.ready_tid, e.ctid as tid, 1 as nth, :branch::text as branch, :reason::text as reason,
         :timeout_ms::bigint as timeout_ms,
         e.attempt_timeout_at is not null as had_timeout, e.attached & 1 <> 0 as was_granted, e.attached & 4 <> 0 as had_stream,
         nullif(:attempt_id::uuid, (:lease_ids::uuid[])[1]) as given_attempt_id, :attempt_policy::text::jsonb as given_policy,
         :deadline_at::bigint as given_deadline_at, :slot_keys::int[] as given_slot_keys,
         e.eligibility_state in ('blocked_by_quota', 'blocked_by_budget') as was_blocked
    from execution e
   cross join lateral (select q.route_no from queue q where q.queue_no = e.queue_no limit 1) q
   cross join lateral (
         select r.route_no, r.ctid as ready_tid from ready r
          where r.route_no = q.route_no and r.queue_no = e.queue_no and r.place = e.place limit 1) r
   where e.partition_key = :partition_key and e.execution_id = :execution_id
),
-- include: leased
-- include: answer
;

-- name: lock_best_of_routes
-- Locks the best execution of the lanes for which this worker may get a grant; returns a row of nulls if there is none.
with clock as materialized (select ff_now() as now),
-- include: routes
,
-- include: scan
,
-- include: picked
-- include: best
;

-- name: lock_best_of_queues
-- As lock_best_of_routes, but scans only the wanted queues, for a worker that wants few of many.
with clock as materialized (select ff_now() as now),
-- include: queues
,
-- include: scan
,
-- include: picked
-- include: best
;
