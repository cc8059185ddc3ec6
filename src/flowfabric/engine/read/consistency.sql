-- name: read_stretch_end
-- The last of the next so many executions behind a key.
select partition_key, execution_id
  from (select partition_key, execution_id from execution
         where (partition_key, execution_id) > (:after_partition::smallint, :after_id::uuid)
         order by partition_key, execution_id limit :size) stretch
 order by partition_key desc, execution_id desc limit 1;

-- name: list_vectors
-- The state vectors of a stretch of executions.
select distinct lifecycle_phase::text, ownership_state::text, eligibility_state::text, blocking_reason::text,
       terminal_outcome::text, attempt_state::text, public_state::text
  from execution
 where (partition_key, execution_id) > (:after_partition::smallint, :after_id::uuid)
   and (partition_key, execution_id) <= (:last_partition::smallint, :last_id::uuid);

-- name: list_of_vector
-- The executions of a stretch that have one state vector.
select partition_key, execution_id
  from execution
 where (partition_key, execution_id) > (:after_partition::smallint, :after_id::uuid)
   and (partition_key, execution_id) <= (:last_partition::smallint, :last_id::uuid)
   and lifecycle_phase::text = :lifecycle_phase and ownership_state::text = :ownership_state
   and eligibility_state::text = :eligibility_state and blocking_reason::text = :blocking_reason
   and terminal_outcome::text = :terminal_outcome and attempt_state::text = :attempt_state
   and public_state::text = :public_state
 limit :limit;

-- name: list_impossible
-- What the fields of a stretch of executions, and the rows that belong to them, say that cannot be; a table of rules.
with clock as materialized (select ff_now() as now)
select e.partition_key, e.execution_id, rule.problem
  from clock c
 cross join execution e
  left join lateral ff_input(e.namespace_no, e.lane_no, e.created_at, e.partition_key, e.execution_id) i on true
  left join lateral (
       select q.queue_no, q.lane_no, q.namespace_no, k.execution_kind
         from queue q join kind k using (kind_no) where q.queue_no = e.queue_no limit 1) q on true
  left join suspension u on u.partition_key = e.partition_key and u.execution_id = e.execution_id
 cross join lateral (
       select count(*) filter (where p.waitpoint_id = any(u.waitpoint_ids)) as bound,
              count(*) filter (where p.state = 'active' and (u.closed_at is not null or u.suspension_id is distinct from p.suspension_id)) as stray,
              count(*) filter (where (p.state in ('pending', 'active')) <> (p.closed_at is null)) as half_closed
         from waitpoint p where p.partition_key = e.partition_key and p.execution_id = e.execution_id) p
 cross join lateral (
       select count(*) as tags, max(t.value) filter (where t.key = :instance_tag) as instance
         from execution_tag t where t.partition_key = e.partition_key and t.execution_id = e.execution_id) t
 cross join lateral (
       select count(*) as stored, coalesce(max(a.attempt_index), -1) as last, coalesce(max(a.lease_epoch), 0) as epoch,
              count(*) filter (where a.attempt_state in ('created', 'started')) as started,
              count(*) filter (where a.attempt_state = 'suspended' and a.attempt_index < e.attempt_count - 1) as left_parked,
              count(*) filter (where a.lease_epoch <= a.epoch_before) as not_rising,
              count(*) filter (where (a.ended_at is null) <> (a.attempt_state in ('created', 'started', 'suspended'))) as half_ended,
              max(a.attempt_state) filter (where a.attempt_index = e.attempt_count - 1) as latest
         from (select a.attempt_index, a.attempt_state, a.lease_epoch, a.ended_at,
                      lag(a.lease_epoch) over (order by a.attempt_index) as epoch_before
                 from attempt a where a.partition_key = e.partition_key and a.execution_id = e.execution_id) a) a
 cross join lateral (
       select e.lifecycle_phase = 'active' as is_active, e.lifecycle_phase = 'terminal' as is_terminal,
              e.lifecycle_phase = 'runnable' as is_runnable, e.ownership_state <> 'unowned' as is_owned,
              e.ownership_state in ('lease_expired_reclaimable', 'lease_revoked') as is_lost) s
 cross join lateral (values
       ('partition_key: is negative', e.partition_key < 0),
       ('lifecycle_phase: submitted is never left stored', e.lifecycle_phase = 'submitted'),
       ('ownership_state: active work is owned', s.is_active and not s.is_owned),
       ('blocking_reason: does not fit the rest of the state', e.blocking_reason <> all (case
         when s.is_terminal or e.ownership_state = 'leased' then '{none}'::blocking_reason[]
         when s.is_lost then '{waiting_for_worker,paused_by_flow_cancel}'::blocking_reason[]
         when e.lifecycle_phase = 'suspended' then
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
       ('attempt_state: does not fit the rest of the state', e.attempt_state <> all (case
         when e.ownership_state = 'leased' then '{running_attempt}'::attempt_state[]
         when s.is_lost or e.lifecycle_phase = 'suspended' then '{attempt_interrupted}'::attempt_state[]
         when s.is_terminal then '{attempt_terminal,none,pending_first_attempt,pending_replay_attempt}'::attempt_state[]
         else '{pending_first_attempt,pending_retry_attempt,pending_replay_attempt,attempt_interrupted}'::attempt_state[] end)),
       ('completed_at: is set exactly while terminal', (e.completed_at is not null) <> s.is_terminal),
       ('retain_until: is set exactly while terminal', (e.retain_until is not null) <> s.is_terminal),
       ('started_at: is set exactly from the first attempt on', (e.started_at is not null) <> (e.attempt_count > 0)),
       ('delay_until: is missing', e.eligibility_state = 'not_eligible_until_time' and e.delay_until is null),
       ('cancelled_by: without a cancellation', e.terminal_outcome <> 'cancelled' and e.cancelled_by is not null),
       ('attempt_count: does not fit attempt_state', case
         when e.attempt_state = 'pending_first_attempt' then e.attempt_count <> 0
         when e.attempt_state in ('running_attempt', 'attempt_interrupted', 'pending_retry_attempt', 'attempt_terminal') then e.attempt_count < 1
         else e.attempt_count < 0 end),
       ('attempt_id: does not fit attempt_state', case
         when e.attempt_state in ('running_attempt', 'attempt_interrupted') then e.attempt_id is null
         -- What ended while it waited for another attempt has none.
         when e.attempt_state = 'attempt_terminal' then e.attempt_id is null and e.terminal_outcome not in ('cancelled', 'expired', 'skipped')
         else e.attempt_id is not null and (e.attempt_count = 0 or e.attempt_state = 'pending_retry_attempt') end),
       ('lease_epoch: is lower than the number of attempts', e.lease_epoch < e.attempt_count),
       ('lease_epoch: is lower than that of an attempt', e.lease_epoch < a.epoch),
       ('lease: is owned without all of its fields', s.is_owned and (e.lease_id is null or e.attempt_id is null
         or e.attempt_type is null or e.worker_no is null or e.claimed_at is null or e.lease_expires_at is null)),
       -- A completed row keeps its lease columns, which are spent.
       ('lease: is left on what nobody owns', not s.is_owned and e.terminal_outcome <> 'success'
         and (e.lease_id is not null or e.worker_no is not null or e.claimed_at is not null or e.lease_expires_at is not null)),
       ('lease_expired_at: does not fit ownership_state', (e.lease_expired_at is not null) <> (e.ownership_state = 'lease_expired_reclaimable')),
       ('lease_revoked_at: does not fit ownership_state', (e.lease_revoked_at is not null) <> (e.ownership_state = 'lease_revoked')),
       ('retry_count: is impossible', e.retry_count not between 0 and e.attempt_count),
       ('replay_count: is negative', e.replay_count < 0),
       ('reclaim_count: is impossible', e.reclaim_count not between 0 and greatest(e.attempt_count - 1, 0)),
       ('attempt: the rows are not as many as were counted',
         a.stored <> e.attempt_count - (s.is_active and not e.attempt_stored)::int and e.attempt_count >= 0),
       ('attempt: an index is beyond the count', a.last >= e.attempt_count),
       ('attempt: one is stored as started', a.started > 0),
       ('attempt: one before the latest is parked', a.left_parked > 0),
       ('attempt: ended_at does not fit the state of one', a.half_ended > 0),
       ('attempt: the epochs do not rise', a.not_rising > 0),
       ('attempt: the latest one does not fit attempt_state', case
         when s.is_active or a.latest is null then false
         when e.attempt_state = 'attempt_interrupted' then a.latest <> 'suspended'
         else a.latest = 'suspended' end),
       ('suspension: is missing, or closed, though the execution is suspended',
         e.lifecycle_phase = 'suspended' and (u.execution_id is null or u.closed_at is not null)),
       ('suspension: is open though the execution is not suspended',
         e.lifecycle_phase <> 'suspended' and u.execution_id is not null and u.closed_at is null),
       ('suspension: of another attempt than the latest', e.lifecycle_phase = 'suspended' and u.attempt_index <> e.attempt_count - 1),
       ('suspension: of another namespace or lane', u.namespace_no <> e.namespace_no or u.lane_no <> q.lane_no),
       ('suspension: not every waitpoint of it is there', p.bound <> cardinality(u.waitpoint_ids)),
       ('suspension_timeout_at: does not fit the suspension', (e.suspension_timeout_at is not null)
         <> (e.lifecycle_phase = 'suspended' and u.timeout_at is not null)),
       ('waitpoint: one is active without an open suspension of its own', p.stray > 0),
       ('waitpoint: closed_at does not fit the state of one', p.half_closed > 0),
       ('place: does not fit priority', e.place >> 48 <> 9000 - e.priority),
       ('queue_no: there is no such queue', q.queue_no is null),
       ('queue_no: is not one of its lane', q.lane_no <> e.lane_no),
       ('queue_no: is not one of its namespace', q.namespace_no <> e.namespace_no),
       ('queue_no: is not one of its kind', q.execution_kind <> i.execution_kind),
       ('namespace_no: there is no such namespace', not exists (select from namespace n where n.namespace_no = e.namespace_no)),
       ('worker_no: there is no such worker', e.worker_no is not null
         and not exists (select from worker_identity w where w.worker_no = e.worker_no)),
       ('granted_until: without a grant', e.granted_until > c.now and (s.is_terminal or not exists (
         select from claim_grant g
          where g.partition_key = e.partition_key and g.execution_id = e.execution_id and g.expires_at = e.granted_until))),
       ('execution_input: is missing', i.execution_id is null),
       ('execution_tag: has_tags does not say whether there are any', i.has_tags <> (t.tags > 0)),
       ('instance_tag: is not the value of its tag', e.instance_tag is distinct from t.instance)
       ) as rule(problem, is_broken)
 where (e.partition_key, e.execution_id) > (:after_partition::smallint, :after_id::uuid)
   and (e.partition_key, e.execution_id) <= (:last_partition::smallint, :last_id::uuid)
   and rule.is_broken
 limit :limit;

-- name: list_orphans
-- Rows that belong to an execution there is not.
(select i.partition_key, i.execution_id, 'execution_input: without its execution' as problem from execution_input i
  where not exists (
        select from execution e
         where e.partition_key = i.partition_key and e.execution_id = i.execution_id and e.namespace_no = i.namespace_no
           and e.lane_no = i.lane_no and e.created_at = i.created_at) limit :limit)
union all
(select distinct a.partition_key, a.execution_id, 'attempt: without its execution' from attempt a
  where not exists (select from execution e where e.partition_key = a.partition_key and e.execution_id = a.execution_id) limit :limit)
union all
(select distinct t.partition_key, t.execution_id, 'execution_tag: without its execution' from execution_tag t
  where not exists (select from execution e where e.partition_key = t.partition_key and e.execution_id = t.execution_id) limit :limit)
union all
(select g.partition_key, g.execution_id, 'claim_grant: without its execution' from claim_grant g
  where not exists (select from execution e where e.partition_key = g.partition_key and e.execution_id = g.execution_id) limit :limit)
union all
(select s.partition_key, s.execution_id, 'suspension: without its execution' from suspension s
  where not exists (select from execution e where e.partition_key = s.partition_key and e.execution_id = s.execution_id) limit :limit)
union all
(select distinct w.partition_key, w.execution_id, 'waitpoint: without its execution' from waitpoint w
  where not exists (select from execution e where e.partition_key = w.partition_key and e.execution_id = w.execution_id) limit :limit)
union all
(select distinct x.partition_key, x.execution_id, 'signal: without its execution' from signal x
  where not exists (select from execution e where e.partition_key = x.partition_key and e.execution_id = x.execution_id) limit :limit);
