-- name: read_range_end
-- The last key of the next :size executions after a key.
select partition_key, execution_id
  from (select partition_key, execution_id from execution
         where (partition_key, execution_id) > (:after_partition::smallint, :after_id::uuid)
         order by partition_key, execution_id limit :size) r
 order by partition_key desc, execution_id desc limit 1;

-- name: list_vectors
-- The distinct state vectors of a range of executions.
select distinct lifecycle_phase::text, ownership_state::text, eligibility_state::text, blocking_reason::text,
       terminal_outcome::text, attempt_state::text, public_state::text
  from execution
 where (partition_key, execution_id) > (:after_partition::smallint, :after_id::uuid)
   and (partition_key, execution_id) <= (:last_partition::smallint, :last_id::uuid);

-- name: list_with_vector
-- The executions of a range that have a given state vector.
select partition_key, execution_id
  from execution
 where (partition_key, execution_id) > (:after_partition::smallint, :after_id::uuid)
   and (partition_key, execution_id) <= (:last_partition::smallint, :last_id::uuid)
   and lifecycle_phase::text = :lifecycle_phase and ownership_state::text = :ownership_state
   and eligibility_state::text = :eligibility_state and blocking_reason::text = :blocking_reason
   and terminal_outcome::text = :terminal_outcome and attempt_state::text = :attempt_state
   and public_state::text = :public_state
 limit :limit;

-- name: list_broken_rules
-- The rules that the executions of a range, or the rows that belong to them, break.
with clock as materialized (select ff_now() as now),
subject as materialized (
  select e.*, coalesce(e.attempt_id, e.lease_id) is not null as has_attempt,
         e.lifecycle_phase = 'active' as is_active, e.lifecycle_phase = 'terminal' as is_terminal,
         e.lifecycle_phase = 'suspended' as is_suspended, e.ownership_state <> 'unowned' as is_owned, l.is_lost,
         e.attempt_state in ('pending_retry_attempt', 'pending_replay_attempt') as is_pending,
         (e.eligibility_state = 'eligible_now' or l.is_lost) and e.blocking_reason <> 'paused_by_flow_cancel' as is_claimable,
         l.is_lost or e.public_state in ('resumable', 'failed', 'cancelled', 'expired', 'skipped')
           or e.eligibility_state not in ('eligible_now', 'not_eligible_until_time', 'not_applicable') as is_listed
    from execution e
   cross join lateral (select e.ownership_state in ('lease_expired_reclaimable', 'lease_revoked') as is_lost) l
   where (e.partition_key, e.execution_id) > (:after_partition::smallint, :after_id::uuid)
     and (e.partition_key, e.execution_id) <= (:last_partition::smallint, :last_id::uuid)
),
-- No index leads from an execution to its retained batch, but few batches have the same ended_at. `(... in (...)) is true`
-- makes the planner use a hashed subplan instead of a nested loop; the limit, never reached, tells it that the hash is small.
kept as materialized (
  select distinct k.partition_key, k.execution_id, k.ended_at, k.queue_no, k.terminal_outcome
    from (select r.partition_key, unnest(r.execution_ids) as execution_id, r.ended_at, r.terminal_outcome,
                 unnest(case when r.queue_no is not null then array_fill(r.queue_no, array[cardinality(r.execution_ids)])
                             when cardinality(r.queue_nos) = cardinality(r.execution_ids) then r.queue_nos end) as queue_no
            from retained r
           where ((r.partition_key, r.ended_at) in (select partition_key, last_transition_at from subject where is_terminal)) is true
          offset 0) k
   where ((k.partition_key, k.execution_id, k.ended_at) in (
         select partition_key, execution_id, last_transition_at from subject where is_terminal)) is true
   limit 10000
)
select e.partition_key, e.execution_id, rule.problem
  from clock c
 cross join subject e
  left join queue q on q.queue_no = e.queue_no
  left join route o on o.route_no = q.route_no
  -- The limits make the planner start from the executions of the range, whatever its estimates.
  left join lateral (select r.* from ready r where r.queue_no = e.queue_no and r.place = e.place limit 1) r on true
  left join lateral (
       select i.* from listed i where i.partition_key = e.partition_key and i.execution_id = e.execution_id limit 1) i on true
  left join lateral (select m.* from claim m where m.partition_key = e.partition_key and m.claim_no = e.claim_no limit 1) m on true
  left join lateral (
       select v.execution_id from execution_input v
        where v.partition_key = e.partition_key and v.execution_id = e.execution_id limit 1) v on true
  left join lateral (
       select x.execution_id from execution_result x
        where x.partition_key = e.partition_key and x.execution_id = e.execution_id limit 1) x on true
  left join lateral (
       select g.* from claim_grant g where g.partition_key = e.partition_key and g.execution_id = e.execution_id limit 1) g on true
  left join lateral (
       select u.* from suspension u
        where u.partition_key = e.partition_key and u.execution_id = e.execution_id and u.suspension_id = e.suspension_id limit 1) u on true
  left join lateral (
       select l.* from attempt l
        where l.partition_key = e.partition_key and l.execution_id = e.execution_id and l.attempt_index = e.attempt_count - 1 limit 1) l on true
  left join lateral (
       select n.* from attempt n
        where n.partition_key = e.partition_key and n.execution_id = e.execution_id and n.attempt_index = e.attempt_count limit 1) n on true
 cross join lateral (
       select max(t.due_at) filter (where t.kind = 'delay') as delay,
              max(t.due_at) filter (where t.kind = 'attempt_timeout') as attempt_timeout,
              max(t.due_at) filter (where t.kind = 'deadline') as deadline,
              max(t.due_at) filter (where t.kind = 'suspension_timeout') as suspension_timeout
         from timer t where t.partition_key = e.partition_key and t.execution_id = e.execution_id) d
 cross join lateral (
       select count(*) filter (where s.closed_at is null) as open,
              count(*) filter (where s.closed_at is null and s.suspension_id is distinct from e.suspension_id) as other_open,
              count(*) filter (where s.namespace_no <> e.namespace_no or s.lane_no <> e.lane_no) as elsewhere,
              count(*) filter (where s.attempt_index not between 0 and e.attempt_count - 1) as of_no_attempt,
              count(*) filter (where s.attempt_index > u.attempt_index or u.execution_id is null) as later,
              count(*) filter (where exists (
                select from unnest(s.waitpoint_ids) as w(waitpoint_id)
                 where not exists (
                       select from waitpoint p
                        where p.partition_key = s.partition_key and p.waitpoint_id = w.waitpoint_id
                          and p.execution_id = s.execution_id and p.suspension_id = s.suspension_id))) as incomplete
         from suspension s where s.partition_key = e.partition_key and s.execution_id = e.execution_id) s
 cross join lateral (
       select count(*) filter (where p.state = 'active' and (u.closed_at is not null or u.suspension_id is distinct from p.suspension_id)) as stray,
              count(*) filter (where (p.state in ('pending', 'active')) <> (p.closed_at is null)) as half_closed
         from waitpoint p where p.partition_key = e.partition_key and p.execution_id = e.execution_id) p
 cross join lateral (
       select count(*) as streams, count(*) filter (where y.attempt_index not between 0 and e.attempt_count - 1) as of_no_attempt,
              count(*) filter (where y.attempt_index = e.attempt_count - 1 and y.closed_at is null) as open,
              count(*) filter (where y.frame_count < 1 or y.first_frame_no not between 1 and y.frame_count + 1
                or (y.has_durable_frame and y.closed_at is null and y.expires_at is not null)) as wrong_counts,
              count(*) filter (where y.first_frame_no <= y.frame_count
                and (f.frame_no, f.ms, f.seq) is distinct from (y.frame_count, y.last_ms, y.last_seq)) as wrong_last,
              count(*) filter (where o.is_present) as wrong_oldest,
              count(*) filter (where z.version is not null and not y.has_durable_frame) as without_patch
         from stream y
         left join lateral (
              select f.frame_no, f.ms, f.seq from stream_frame f
               where f.partition_key = y.partition_key and f.execution_id = y.execution_id and f.attempt_index = y.attempt_index
               order by f.ms desc, f.seq desc limit 1) f on true
         left join lateral (
              select true as is_present from stream_frame f
               where f.partition_key = y.partition_key and f.execution_id = y.execution_id and f.attempt_index = y.attempt_index
                 and (f.ms, f.seq) < (y.oldest_ms, y.oldest_seq)
               limit 1) o on true
         left join lateral (
              select z.version from stream_summary z
               where z.partition_key = y.partition_key and z.execution_id = y.execution_id and z.attempt_index = y.attempt_index
               limit 1) z on true
        where y.partition_key = e.partition_key and y.execution_id = e.execution_id) y
 cross join lateral (
       select count(*) as tags, max(t.value) filter (where t.key = :instance_tag) as instance
         from execution_tag t where t.partition_key = e.partition_key and t.execution_id = e.execution_id) t
 cross join lateral (
       select count(*) filter (where a.ended_at is not null) as ended, coalesce(max(a.attempt_index), -1) as last,
              coalesce(max(a.attempt_index) filter (where a.attempt_state <> 'created'), -1) as last_begun,
              coalesce(max(a.lease_epoch), 0) as epoch,
              coalesce(max(a.lease_epoch) filter (where a.attempt_index < e.attempt_count - 1), 0) as earlier_epoch,
              count(*) filter (where a.attempt_state = 'started') as started,
              count(*) filter (where a.ended_at is null and a.attempt_index < e.attempt_count - 1) as left_open,
              count(*) filter (where a.lease_epoch <= a.epoch_before) as not_rising,
              count(*) filter (where (a.ended_at is null) <> (a.attempt_state in ('created', 'started', 'suspended'))) as half_ended,
              count(*) filter (where a.ended_at is not null
                and (a.attempt_id is null or a.attempt_type is null or a.started_at is null or a.lease_epoch is null)) as incomplete,
              count(*) filter (where a.attempt_type in ('retry', 'reclaim', 'replay') and a.attempt_index > 0 and a.previous_attempt_index is null) as unlinked,
              count(*) filter (where (a.error_type is not null or a.traceback is not null) and a.attempt_state <> 'ended_failure'
                and not (a.attempt_index = e.attempt_count - 1 and e.terminal_outcome = 'failed')) as not_failed,
              count(*) filter (where a.previous_attempt_index >= a.attempt_index) as misled
         from (select a.*, lag(a.lease_epoch) over (order by a.attempt_index) as epoch_before
                 from attempt a where a.partition_key = e.partition_key and a.execution_id = e.execution_id) a) a
 cross join lateral (values
       ('partition_key: negative', e.partition_key < 0),
       ('lifecycle_phase: submitted is never stored', e.lifecycle_phase = 'submitted'),
       ('ownership_state: unowned though the execution is active', e.is_active and not e.is_owned),
       ('blocking_reason: contradicts the rest of the state', e.blocking_reason <> all (case
         when e.is_terminal or e.ownership_state = 'leased' then '{none}'::blocking_reason[]
         when e.is_lost then '{waiting_for_worker,paused_by_flow_cancel}'::blocking_reason[]
         when e.is_suspended then
           '{waiting_for_signal,waiting_for_approval,waiting_for_callback,waiting_for_tool_result,waiting_for_budget,paused_by_operator,paused_by_policy}'::blocking_reason[]
         else case e.eligibility_state
           when 'eligible_now' then '{waiting_for_worker}'::blocking_reason[]
           when 'not_eligible_until_time' then '{waiting_for_delay,waiting_for_retry_backoff,waiting_for_resume_delay}'::blocking_reason[]
           when 'blocked_by_dependencies' then '{waiting_for_children}'::blocking_reason[]
           when 'blocked_by_budget' then '{waiting_for_budget}'::blocking_reason[]
           when 'blocked_by_quota' then '{waiting_for_quota}'::blocking_reason[]
           when 'blocked_by_route' then '{waiting_for_capable_worker,waiting_for_locality_match}'::blocking_reason[]
           when 'blocked_by_operator' then '{paused_by_operator,paused_by_flow_cancel}'::blocking_reason[]
           when 'blocked_by_lane_state' then '{paused_by_policy}'::blocking_reason[]
           else '{}'::blocking_reason[] end end)),
       ('attempt_state: contradicts the rest of the state', e.attempt_state <> all (case
         when e.ownership_state = 'leased' then '{running_attempt}'::attempt_state[]
         when e.is_lost or e.is_suspended then '{attempt_interrupted}'::attempt_state[]
         when e.is_terminal then '{attempt_terminal,none,pending_first_attempt,pending_replay_attempt}'::attempt_state[]
         else '{pending_first_attempt,pending_retry_attempt,pending_replay_attempt,attempt_interrupted}'::attempt_state[] end)),
       ('started_at: must be set if and only if there was an attempt', (coalesce(e.started_at, e.claimed_at) is not null) <> (e.attempt_count > 0)),
       ('started_at: missing after the first of several attempts', e.attempt_count > 1 and e.started_at is null),
       ('delay_until: missing on a delayed execution', e.eligibility_state = 'not_eligible_until_time' and e.delay_until is null),
       ('result_payload: set though the execution did not succeed', e.result_payload is not null and e.terminal_outcome <> 'success'),
       ('cancelled_by: set though the execution was not cancelled', e.terminal_outcome <> 'cancelled' and e.cancelled_by is not null),
       ('attempt_count: contradicts attempt_state', case
         when e.attempt_state = 'pending_first_attempt' then e.attempt_count <> 0
         when e.attempt_state in ('running_attempt', 'attempt_interrupted', 'pending_retry_attempt', 'attempt_terminal') then e.attempt_count < 1
         else e.attempt_count < 0 end),
       ('attempt_id: contradicts attempt_state', case
         when e.attempt_state in ('running_attempt', 'attempt_interrupted') then not e.has_attempt
         -- An execution that ended while it waited for its next attempt has none.
         when e.attempt_state = 'attempt_terminal' then not e.has_attempt and e.terminal_outcome not in ('cancelled', 'expired', 'skipped')
         else e.has_attempt end),
       ('lease_epoch: lower than attempt_count', e.lease_epoch < e.attempt_count),
       ('lease_epoch: lower than the epoch of an attempt', e.lease_epoch < a.epoch),
       ('lease_epoch: not higher than the epoch of an earlier attempt', e.has_attempt and e.lease_epoch <= a.earlier_epoch),
       ('lease: a field of the lease is missing', e.is_owned and (e.lease_id is null or e.attempt_type is null
         or e.worker_no is null or e.claimed_at is null or e.lease_expires_at is null or e.claim_no is null)),
       -- A terminal execution keeps the columns of its last lease.
       ('lease_id: set though the execution is unowned', e.lease_id is not null and not e.is_owned and not e.is_terminal),
       ('lease_expired_at: contradicts ownership_state', (e.lease_expired_at is not null) <> (e.ownership_state = 'lease_expired_reclaimable')),
       ('lease_revoked_at: contradicts ownership_state', (e.lease_revoked_at is not null) <> (e.ownership_state = 'lease_revoked')),
       ('retry_count: not between 0 and attempt_count', e.retry_count not between 0 and e.attempt_count),
       ('replay_count: negative', e.replay_count < 0),
       ('reclaim_count: not between 0 and attempt_count - 1', e.reclaim_count not between 0 and greatest(e.attempt_count - 1, 0)),
       -- The latest attempt is stored on the execution row until the next one starts, except one that reached the reclaim limit.
       ('attempt: the number of ended rows contradicts attempt_count', e.attempt_count >= 0
         and a.ended <> e.attempt_count - (e.has_attempt and not (e.is_terminal and l.attempt_state is not distinct from 'interrupted_reclaimed'))::int),
       ('attempt: an attempt_index is beyond attempt_count', a.last_begun >= e.attempt_count or a.last > e.attempt_count),
       ('attempt: the next attempt is stored though none is pending', n.attempt_index is not null and not e.is_pending and not (e.is_terminal and not e.has_attempt)),
       ('attempt: the pending attempt has no previous_attempt_index', e.is_pending and e.attempt_count > 0 and n.previous_attempt_index is null),
       -- The first attempt of an execution that ended without one and was replayed follows none.
       ('attempt: a retry, reclaim or replay has no previous_attempt_index', a.unlinked > 0
         or (e.has_attempt and e.attempt_count > 1 and e.attempt_type in ('retry', 'reclaim', 'replay') and l.previous_attempt_index is null)),
       ('attempt: a previous_attempt_index is not lower than its attempt_index', a.misled > 0),
       ('attempt: a row has the state started', a.started > 0),
       ('attempt: an attempt before the latest has not ended', a.left_open > 0),
       ('attempt: a field of an ended attempt is missing', a.incomplete > 0),
       ('attempt: ended_at contradicts attempt_state', a.half_ended > 0),
       ('attempt: an attempt that has not failed has an error', a.not_failed > 0),
       ('attempt: lease_epoch does not increase from one attempt to the next', a.not_rising > 0),
       ('attempt: the latest attempt contradicts the execution', case
         when e.attempt_state = 'attempt_interrupted' and not e.is_owned then l.attempt_state is distinct from 'suspended' or l.suspended_at is null
         when e.has_attempt and l.ended_at is not null then l.attempt_state <> 'interrupted_reclaimed' or not e.is_terminal end),
       ('attached: the suspension bit contradicts the suspensions', (e.attached & 2 <> 0) <> (s.open > 0)),
       ('attached: the grant bit is missing', e.attached & 1 = 0 and (g.execution_id is not null or e.granted_until is not null)),
       -- Versions without streams keep the bit when they begin another attempt.
       ('attached: the stream bit is set without a stream', e.attached & 4 <> 0 and y.streams = 0),
       ('attached: the stream bit is missing', e.attached & 4 = 0 and y.open > 0 and not e.is_terminal),
       ('stream: its attempt does not exist', y.of_no_attempt > 0),
       ('stream: the counters contradict each other', y.wrong_counts > 0),
       ('stream: the newest frame contradicts the counters', y.wrong_last > 0),
       ('stream: a frame has an id below that of the oldest', y.wrong_oldest > 0),
       ('stream_summary: present though the stream has no summary frame', y.without_patch > 0),
       ('granted_until: set without a matching grant', e.granted_until > c.now and (e.is_terminal or g.expires_at is distinct from e.granted_until)),
       ('suspension_id: the suspension does not exist', e.suspension_id is not null and u.execution_id is null),
       ('suspension_id: not the latest suspension', s.later > 0),
       ('suspension: missing or closed though the execution is suspended', e.is_suspended and (u.execution_id is null or u.closed_at is not null)),
       ('suspension: open though the execution is not suspended', not e.is_suspended and s.open > 0),
       ('suspension: an earlier suspension is open', s.other_open > 0),
       ('suspension: does not belong to the latest attempt', e.is_suspended and u.attempt_index <> e.attempt_count - 1),
       ('suspension: its attempt does not exist', s.of_no_attempt > 0),
       ('suspension: its namespace or lane is not that of the execution', s.elsewhere > 0),
       ('suspension: a waitpoint is missing', s.incomplete > 0),
       ('suspension_timeout_at: contradicts the suspension', (e.suspension_timeout_at is not null)
         <> (e.is_suspended and u.timeout_at is not null)),
       ('waitpoint: active though its suspension is not open', p.stray > 0),
       ('waitpoint: closed_at contradicts the state', p.half_closed > 0),
       ('place: the priority is out of range', (e.place >> 48) not between 0 and 9000),
       ('queue_no: the queue does not exist', q.queue_no is null),
       ('queue_no: the queue belongs to another lane', q.lane_no <> e.lane_no or o.lane_no <> e.lane_no),
       ('queue_no: the queue belongs to another namespace', q.namespace_no <> e.namespace_no),
       ('namespace_no: the namespace does not exist', not exists (select from namespace n where n.namespace_no = e.namespace_no)),
       ('worker_no: the worker does not exist', e.is_owned and e.worker_no is not null
         and not exists (select from worker_identity w where w.worker_no = e.worker_no)),
       ('ready: no entry though the execution is claimable', e.is_claimable and r.place is null),
       -- An execution that was claimable keeps its entry while a limit blocks it.
       ('ready: an entry though the execution is not claimable', not e.is_claimable
         and e.eligibility_state not in ('blocked_by_budget', 'blocked_by_quota') and r.place is not null),
       -- The previous version leaves slot_keys when it ends a lease; they mean nothing without a lease and without a grant.
       ('attached: the slot bit contradicts slot_keys', (e.ownership_state = 'leased' or e.granted_until is not null)
         and (e.attached & 8 <> 0) <> (coalesce(cardinality(e.slot_keys), 0) > 0)),
       ('ready: the entry names another execution', (r.partition_key, r.execution_id) <> (e.partition_key, e.execution_id)),
       ('ready: the route is not the route of the queue', r.route_no <> q.route_no),
       ('ready: granted_until is not granted_until of the execution', r.place is not null and r.granted_until is distinct from e.granted_until),
       ('listed: the entry is missing', e.is_listed and i.execution_id is null),
       ('listed: the entry contradicts the state of the execution', i.execution_id is not null and (not e.is_listed or i.public_state <> e.public_state)),
       ('listed: at is not the time the execution ended', e.is_terminal and i.at <> e.last_transition_at),
       ('timer: delay contradicts the execution', (d.delay is not null) <> (e.eligibility_state = 'not_eligible_until_time')),
       ('timer: attempt_timeout contradicts the execution',
         (d.attempt_timeout is not null) <> (e.is_active and e.attempt_timeout_at is not null)),
       ('timer: deadline contradicts the execution', (d.deadline is not null) <> (not e.is_terminal and e.deadline_at is not null)),
       ('timer: suspension_timeout contradicts the execution',
         (d.suspension_timeout is not null) <> (e.is_suspended and e.suspension_timeout_at is not null)),
       -- A timer set to a past time is due at the time it was set.
       ('timer: due_at contradicts the execution',
         d.delay < e.delay_until or (d.delay > e.delay_until and d.delay > c.now)
         or d.attempt_timeout < e.attempt_timeout_at or (d.attempt_timeout > e.attempt_timeout_at and d.attempt_timeout > c.now)
         or d.deadline < e.deadline_at or (d.deadline > e.deadline_at and d.deadline > c.now)
         or d.suspension_timeout < e.suspension_timeout_at
         or (d.suspension_timeout > e.suspension_timeout_at and d.suspension_timeout > c.now)),
       ('claim: the claim of the lease is missing', e.ownership_state = 'leased' and m.claim_no is null),
       ('claim: the claim of the lease does not contain the execution', e.ownership_state = 'leased' and e.execution_id <> all(m.execution_ids)),
       ('claim: the claim of the lease belongs to another worker', e.ownership_state = 'leased' and m.worker_no <> e.worker_no),
       ('retained: no entry though the execution ended', e.is_terminal
         and (e.partition_key, e.execution_id, e.last_transition_at) not in (select k.partition_key, k.execution_id, k.ended_at from kept k)),
       ('retained: the entry has another queue or outcome', e.is_terminal
         and (e.partition_key, e.execution_id, e.last_transition_at) in (
             select k.partition_key, k.execution_id, k.ended_at from kept k where k.queue_no is not null)
         and (e.partition_key, e.execution_id, e.last_transition_at, e.queue_no, e.terminal_outcome) not in (
             select k.partition_key, k.execution_id, k.ended_at, k.queue_no, coalesce(k.terminal_outcome, 'none')
               from kept k where k.queue_no is not null)),
       ('input_payload: neither on the row nor in execution_input', e.input_payload is null and v.execution_id is null),
       ('input_payload: both on the row and in execution_input', e.input_payload is not null and v.execution_id is not null),
       ('result_payload: both on the row and in execution_result', e.result_payload is not null and x.execution_id is not null),
       ('execution_result: present though the execution did not succeed', x.execution_id is not null and e.terminal_outcome <> 'success'),
       ('execution_tag: has_tags contradicts the tags', e.has_tags <> (t.tags > 0)),
       ('instance_tag: not the value of the tag', e.instance_tag is distinct from t.instance)
       ) as rule(problem, is_broken)
 where rule.is_broken
 limit :limit;

-- name: list_orphans
-- Rows whose execution does not exist.
(select distinct a.partition_key, a.execution_id, 'attempt: its execution does not exist' as problem from attempt a
  where not exists (select from execution e where e.partition_key = a.partition_key and e.execution_id = a.execution_id) limit :limit)
union all
(select distinct t.partition_key, t.execution_id, 'execution_tag: its execution does not exist' from execution_tag t
  where not exists (select from execution e where e.partition_key = t.partition_key and e.execution_id = t.execution_id) limit :limit)
union all
(select i.partition_key, i.execution_id, 'execution_input: its execution does not exist' from execution_input i
  where not exists (select from execution e where e.partition_key = i.partition_key and e.execution_id = i.execution_id) limit :limit)
union all
(select r.partition_key, r.execution_id, 'execution_result: its execution does not exist' from execution_result r
  where not exists (select from execution e where e.partition_key = r.partition_key and e.execution_id = r.execution_id) limit :limit)
union all
(select g.partition_key, g.execution_id, 'claim_grant: its execution does not exist' from claim_grant g
  where not exists (select from execution e where e.partition_key = g.partition_key and e.execution_id = g.execution_id) limit :limit)
union all
(select r.partition_key, r.execution_id, 'ready: its execution does not exist' from ready r
  where not exists (
        select from execution e
         where e.partition_key = r.partition_key and e.execution_id = r.execution_id
           and e.queue_no = r.queue_no and e.place = r.place) limit :limit)
union all
(select distinct t.partition_key, t.execution_id, 'timer: its execution does not exist' from timer t
  where not exists (select from execution e where e.partition_key = t.partition_key and e.execution_id = t.execution_id) limit :limit)
union all
(select i.partition_key, i.execution_id, 'listed: its execution does not exist' from listed i
  where not exists (select from execution e where e.partition_key = i.partition_key and e.execution_id = i.execution_id) limit :limit)
union all
(select distinct s.partition_key, s.execution_id, 'suspension: its execution does not exist' from suspension s
  where not exists (select from execution e where e.partition_key = s.partition_key and e.execution_id = s.execution_id) limit :limit)
union all
(select distinct w.partition_key, w.execution_id, 'waitpoint: its execution does not exist' from waitpoint w
  where not exists (select from execution e where e.partition_key = w.partition_key and e.execution_id = w.execution_id) limit :limit)
union all
(select distinct x.partition_key, x.execution_id, 'signal: its execution does not exist' from signal x
  where not exists (select from execution e where e.partition_key = x.partition_key and e.execution_id = x.execution_id) limit :limit)
union all
-- A version without streams leaves them to the sweep.
(select distinct s.partition_key, s.execution_id, 'stream: its execution does not exist' from stream s
  where s.sweep_at <= (select ff_now()) - :overdue_ms::bigint
    and not exists (select from execution e where e.partition_key = s.partition_key and e.execution_id = s.execution_id) limit :limit)
union all
-- One index lookup for each stream: a stream may have many frames.
(with recursive k as (
   (select f.partition_key, f.execution_id, f.attempt_index from stream_frame f
     order by f.partition_key, f.execution_id, f.attempt_index limit 1)
   union all
   select n.partition_key, n.execution_id, n.attempt_index
     from k cross join lateral (
          select f.partition_key, f.execution_id, f.attempt_index from stream_frame f
           where (f.partition_key, f.execution_id, f.attempt_index) > (k.partition_key, k.execution_id, k.attempt_index)
           order by f.partition_key, f.execution_id, f.attempt_index limit 1) n)
 select distinct k.partition_key, k.execution_id, 'stream_frame: its stream does not exist' from k
  where not exists (
        select from stream s
         where s.partition_key = k.partition_key and s.execution_id = k.execution_id and s.attempt_index = k.attempt_index) limit :limit)
union all
(select distinct y.partition_key, y.execution_id, 'stream_summary: its stream does not exist' from stream_summary y
  where not exists (
        select from stream s
         where s.partition_key = y.partition_key and s.execution_id = y.execution_id and s.attempt_index = y.attempt_index) limit :limit)
union all
(select distinct k.subject_partition, k.subject_id, 'idempotency_key: the execution of the suspend does not exist' from idempotency_key k
  where k.operation = 'suspend'
    and not exists (select from execution e where e.partition_key = k.subject_partition and e.execution_id = k.subject_id) limit :limit)
union all
-- count_executions adds up entries that name the queue of each of their ids, so every id in them must have ended then.
(select distinct r.partition_key, r.execution_id, case when e.execution_id is null then 'retained: its execution does not exist'
                                                       else 'retained: counts an execution that did not end then' end
   from (select partition_key, unnest(execution_ids) as execution_id, ended_at,
                queue_no is not null or cardinality(queue_nos) is not distinct from cardinality(execution_ids) as counts
           from retained offset 0) r
   left join lateral (
        select e.execution_id, e.lifecycle_phase = 'terminal' and e.last_transition_at = r.ended_at as ended_then
          from execution e where e.partition_key = r.partition_key and e.execution_id = r.execution_id limit 1) e on true
  where e.execution_id is null or (r.counts and not e.ended_then) limit :limit);
