-- compatible: no
-- The core: lanes, queues, executions, attempts, events, grants and the worker registry.
-- checksum: 0882f9bfcb1d3aaee3f25a12d83dd365d3acdac6bfd7330ea19994a3aa16a21e

create function ff_now() returns bigint language sql volatile parallel safe
  return (date_part('epoch', clock_timestamp()) * 1000)::bigint;

-- For statements whose answer depends on rows they only read: with a synchronous standby, the commit of such a statement waits
-- until the standby has these rows. Otherwise a restarted primary could report rows whose commit the standby has not
-- confirmed, and a failover would lose them after the caller got the answer.
create function ff_confirm() returns boolean language sql volatile
  return case when current_setting('synchronous_standby_names') = '' then true
              else pg_logical_emit_message(true, 'flowfabric', '') is not null end;

-- The sessions of this user that have waited for their client for at least this many milliseconds in the middle of a
-- statement; none if the argument is null.
create function ff_silent_sessions(bigint) returns setof int language sql volatile
begin atomic
  select pid from pg_stat_activity
   where datname = current_database() and usename = current_user and application_name = 'flowfabric'
     and state = 'active' and wait_event_type = 'Client'
     and state_change <= clock_timestamp() - make_interval(secs => $1 / 1000.0);
end;

create type lifecycle_phase as enum ('submitted', 'runnable', 'active', 'suspended', 'terminal');
create type ownership_state as enum ('unowned', 'leased', 'lease_expired_reclaimable', 'lease_revoked');
create type eligibility_state as enum ('eligible_now', 'not_eligible_until_time', 'blocked_by_dependencies',
  'blocked_by_budget', 'blocked_by_quota', 'blocked_by_route', 'blocked_by_lane_state', 'blocked_by_operator', 'not_applicable');
create type blocking_reason as enum ('none', 'waiting_for_worker', 'waiting_for_retry_backoff', 'waiting_for_resume_delay',
  'waiting_for_delay', 'waiting_for_signal', 'waiting_for_approval', 'waiting_for_callback', 'waiting_for_tool_result',
  'waiting_for_children', 'waiting_for_budget', 'waiting_for_quota', 'waiting_for_capable_worker',
  'waiting_for_locality_match', 'paused_by_operator', 'paused_by_policy', 'paused_by_flow_cancel');
create type terminal_outcome as enum ('none', 'success', 'failed', 'cancelled', 'expired', 'skipped');
create type attempt_state as enum ('none', 'pending_first_attempt', 'running_attempt', 'attempt_interrupted',
  'pending_retry_attempt', 'pending_replay_attempt', 'attempt_terminal');
create type public_state as enum ('waiting', 'delayed', 'rate_limited', 'waiting_children', 'active', 'suspended',
  'resumable', 'completed', 'failed', 'cancelled', 'expired', 'skipped');
create type attempt_lifecycle as enum ('created', 'started', 'suspended', 'ended_success', 'ended_failure',
  'ended_cancelled', 'interrupted_reclaimed');
create type attempt_type as enum ('initial', 'retry', 'reclaim', 'replay', 'fallback');
create type timer_kind as enum ('delay', 'attempt_timeout', 'deadline', 'suspension_timeout');
create type event_kind as enum ('ended', 'acquired', 'renewed', 'released', 'expired', 'revoked', 'reclaimed',
  'replay_initiated', 'operator_resumed');
create type keyed_operation as enum ('submit', 'suspend', 'signal');
create type lane_state as enum ('active', 'paused', 'draining', 'disabled');

-- Written once, at the first start; a process with other settings refuses to run.
create table configuration (
  only_row boolean primary key default true constraint configuration_has_one_row check (only_row),
  flow_partitions int not null,
  budget_partitions int not null,
  quota_partitions int not null);

-- Small global tables, cached in every process: the rows of executions hold numbers instead of long texts.
create table namespace (
  namespace_no int generated always as identity primary key,
  namespace text not null constraint namespace_name unique);
create table lane (
  lane_no int generated always as identity primary key,
  lane_id text not null constraint lane_id unique,
  state lane_state not null default 'active',
  registered_at bigint not null,
  registered_by text not null);
create table capability_set (
  capability_set_no int generated always as identity primary key,
  required text[] not null,
  -- The hash of the sorted tokens joined by commas: a long set would not fit an index entry.
  digest bytea not null constraint capability_set_digest unique);
create table kind (
  kind_no int generated always as identity primary key,
  execution_kind text not null,
  -- The hash of the kind: a long kind would not fit an index entry.
  digest bytea not null constraint kind_digest unique);
create table worker_identity (
  worker_no int generated always as identity primary key,
  worker_id text not null,
  worker_instance_id text not null,
  -- Updated from time to time while the process runs; the identity is deleted a long time after the last update.
  seen_at bigint not null,
  constraint worker_identity_name unique (worker_id, worker_instance_id));
create index worker_identity_age on worker_identity (seen_at);

-- A route is a lane and a capability set: every worker of the lane with these capabilities may claim from it.
create table route (
  route_no int generated always as identity primary key,
  lane_no int not null constraint route_has_lane references lane,
  capability_set_no int not null constraint route_has_capability_set references capability_set,
  constraint route_of_lane unique (lane_no, capability_set_no));
-- A queue is the part of a route with one kind, one namespace and one admission key (0 = none). Claims scan routes or queues
-- in order; they never filter a backlog.
create table queue (
  queue_no int generated always as identity primary key,
  route_no int not null constraint queue_has_route references route,
  lane_no int not null constraint queue_has_lane references lane,
  kind_no int not null constraint queue_has_kind references kind,
  namespace_no int not null constraint queue_has_namespace references namespace,
  admission_key_no int not null default 0,
  -- A claim that names kinds finds its queues by the first two columns.
  constraint queue_of_lane unique (lane_no, kind_no, namespace_no, route_no, admission_key_no));

-- The order of creation. Not cached: numbers increase across connections.
create sequence execution_sequence as bigint;
create sequence claim_sequence as bigint;

-- No index contains a column that changes when an execution is claimed or ends, so both are heap-only updates within the
-- page of the row; the fillfactor leaves space for them. The columns that change are next to each other, because Postgres logs
-- the bytes from the first changed column to the last. Waiting work, timers, claims and lists are in separate narrow tables.
create table execution (
  execution_id uuid not null,
  -- The order of claiming within a route: (9000 - priority) << 48, plus a number in the order of creation.
  place bigint not null,
  created_at bigint not null,
  queue_no int not null,
  namespace_no int not null,
  lane_no int not null,
  partition_key smallint not null,
  has_tags boolean not null default false,
  retry_count int not null default 0,
  reclaim_count int not null default 0,
  replay_count int not null default 0,
  -- One bit for each kind of attachment (1: grant, 2: suspension), which is cleaned up when the lease or the execution ends.
  attached smallint not null default 0,
  attempt_count int not null default 0,
  lease_epoch bigint not null default 0,
  -- The latest lease. Its columns keep their values until the next one, except lease_id: it is null while an execution that
  -- has not ended has no lease.
  claim_no bigint,
  claimed_at bigint,
  -- The expiry at the time of the claim; later renewals are stored in the row of claim.
  lease_expires_at bigint,
  lease_id uuid,
  -- Null if it equals lease_id: the first lease of an attempt gives the attempt its id.
  attempt_id uuid,
  worker_no int,
  attempt_type attempt_type,
  lifecycle_phase lifecycle_phase not null,
  ownership_state ownership_state not null default 'unowned',
  eligibility_state eligibility_state not null,
  blocking_reason blocking_reason not null,
  terminal_outcome terminal_outcome not null default 'none',
  attempt_state attempt_state not null,
  public_state public_state not null generated always as (
    case lifecycle_phase
      when 'terminal' then
        case terminal_outcome
          when 'success' then 'completed'::public_state
          when 'cancelled' then 'cancelled'
          when 'expired' then 'expired'
          when 'skipped' then 'skipped'
          else 'failed' end
      when 'suspended' then 'suspended'
      when 'active' then 'active'
      when 'runnable' then
        case eligibility_state
          when 'not_eligible_until_time' then 'delayed'::public_state
          when 'blocked_by_dependencies' then 'waiting_children'
          when 'blocked_by_budget' then 'rate_limited'
          when 'blocked_by_quota' then 'rate_limited'
          when 'eligible_now' then
            case when attempt_state = 'attempt_interrupted' then 'resumable'::public_state else 'waiting' end
          else 'waiting' end
      else 'waiting' end) stored,
  -- For a terminal execution, the time it ended.
  last_transition_at bigint not null,
  -- Null before the execution succeeds, without a result, and if the result is in execution_result.
  result_payload bytea,
  -- The columns from here to input_payload are null for most executions.
  -- Only set if it is later than last_transition_at.
  last_mutation_at bigint,
  -- When the first attempt began; null if that is claimed_at.
  started_at bigint,
  result_encoding text,
  -- The failure of the latest attempt.
  failure_reason text,
  failure_category text,
  granted_until bigint,
  delay_until bigint,
  deadline_at bigint,
  -- Valid while the execution is active.
  attempt_timeout_at bigint,
  suspension_timeout_at bigint,
  suspension_id uuid,
  remaining_attempt_timeout_ms bigint,
  retention_ms bigint,
  flow_id uuid,
  instance_tag text,
  blocking_detail text,
  cancellation_reason text,
  cancelled_by text,
  -- Of a lost lease, whose claim may be deleted.
  lease_renewed_at bigint,
  lease_expired_at bigint,
  lease_revoked_at bigint,
  lease_revoke_reason text,
  last_capability_mismatch_at bigint,
  last_hmac_validation_failed_at bigint,
  progress_pct smallint,
  progress_message text,
  progress_updated_at bigint,
  creator_identity text not null,
  -- Null if it is in execution_input.
  input_payload bytea,
  payload_encoding text,
  policy jsonb,
  primary key (partition_key, execution_id),
  constraint execution_is_past_submitted check (lifecycle_phase <> 'submitted'),
  constraint execution_owned_is_active check (ownership_state = 'unowned' or lifecycle_phase = 'active'),
  constraint execution_outcome_is_of_terminal check ((terminal_outcome <> 'none') = (lifecycle_phase = 'terminal')),
  constraint execution_eligibility_is_of_runnable check ((eligibility_state <> 'not_applicable') = (lifecycle_phase = 'runnable'))
) with (fillfactor = 30, toast_tuple_target = 1024, autovacuum_vacuum_scale_factor = 0.02,
        autovacuum_vacuum_insert_scale_factor = 0.1, autovacuum_analyze_scale_factor = 0.05);
-- Payloads are not compressed: that costs more than the pages it saves.
alter table execution alter input_payload set storage external, alter result_payload set storage external;
-- Lists merge the scans of all pairs of namespace and lane; executions of the same millisecond are sorted by id when read.
create index execution_list on execution (namespace_no, lane_no, created_at);

-- Inputs of more than 256 bytes. With an input of 1,500 bytes on its row, an execution would need a page for itself, because
-- of the fillfactor. Written and deleted together with the execution, never updated.
create table execution_input (
  partition_key smallint not null,
  execution_id uuid not null,
  input_payload bytea not null,
  primary key (partition_key, execution_id));
alter table execution_input alter input_payload set storage external;

-- Results of more than 256 bytes, so that the update that ends the execution stays within its page. Written when the execution
-- succeeds and deleted with it. A statement that moves an execution out of success must clear result_payload and delete this row.
create table execution_result (
  partition_key smallint not null,
  execution_id uuid not null,
  result_payload bytea not null,
  primary key (partition_key, execution_id));
alter table execution_result alter result_payload set storage external;

-- The claimable executions: one entry for each execution that waits for a worker or has lost its lease. A transaction locks the
-- execution before it inserts or deletes the entry.
create table ready (
  place bigint not null,
  route_no int not null,
  queue_no int not null,
  partition_key smallint not null,
  execution_id uuid not null,
  granted_until bigint
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.1);
create unique index ready_queue on ready (queue_no, place);
create index ready_route on ready (route_no, place);

-- The timers of executions that have not ended. A timer is deleted when it has fired or no longer applies.
create table timer (
  partition_key smallint not null,
  execution_id uuid not null,
  kind timer_kind not null,
  -- A timer set to a past time is stored with the current time, so that sweeps need not scan further back.
  due_at bigint not null,
  primary key (partition_key, execution_id, kind));
create index timer_due on timer (kind, due_at);

-- The leases of one claim, which expire and are renewed together. An execution belongs to the claim only while it is leased and
-- its row has this claim_no.
create table claim (
  partition_key smallint not null,
  claim_no bigint not null,
  worker_no int not null,
  expires_at bigint not null,
  renewed_at bigint,
  execution_ids uuid[] not null,
  primary key (partition_key, claim_no)
) with (fillfactor = 50);
alter table claim alter execution_ids set storage external;
create index claim_due on claim (expires_at);

-- Executions that ended at the same time and may be deleted together. An execution that was replayed ended at a later time and
-- is skipped.
create table retained (
  retain_until bigint not null,
  ended_at bigint not null,
  partition_key smallint not null,
  execution_ids uuid[] not null);
alter table retained alter execution_ids set storage external;
create index retained_due on retained (retain_until);

-- The executions in rarer states, for lists and operators: resumable ones, those blocked by anything except a delay, those that
-- have lost their lease (active), and those that ended without success.
create table listed (
  partition_key smallint not null,
  execution_id uuid not null,
  public_state public_state not null,
  -- When the execution entered the state; for a lost lease, when the lease expired.
  at bigint not null,
  primary key (partition_key, execution_id));
create index listed_state on listed (public_state, at);

-- An execution with the values that are derived from its row; the columns of the lease are null while there is none.
create view execution_detail as
  select e.partition_key, e.execution_id, e.place, (9000 - (e.place >> 48))::smallint as priority, e.queue_no, e.namespace_no,
         e.lane_no, k.execution_kind, e.lifecycle_phase, e.ownership_state, e.eligibility_state, e.blocking_reason,
         e.terminal_outcome, e.attempt_state, e.public_state, e.attached, e.has_tags, e.attempt_count, e.retry_count,
         e.reclaim_count, e.replay_count, e.lease_epoch, coalesce(e.attempt_id, e.lease_id) as attempt_id, e.attempt_type,
         e.created_at, case when e.attempt_count > 0 then coalesce(e.started_at, e.claimed_at) end as started_at,
         case when e.lifecycle_phase = 'terminal' then e.last_transition_at end as completed_at,
         e.last_transition_at,
         greatest(e.last_transition_at, e.last_mutation_at, o.lease_renewed_at) as last_mutation_at,
         o.lease_id, o.claim_no, o.worker_no, o.claimed_at, o.lease_expires_at, o.lease_renewed_at, o.lease_ttl_ms,
         e.lease_expired_at, e.lease_revoked_at, e.lease_revoke_reason, e.claimed_at as last_claimed_at,
         e.granted_until, e.delay_until, e.deadline_at,
         case when e.lifecycle_phase = 'active' then e.attempt_timeout_at end as attempt_timeout_at, e.suspension_timeout_at,
         e.suspension_id, e.remaining_attempt_timeout_ms, e.retention_ms,
         coalesce(e.result_payload, case when e.terminal_outcome = 'success' then (
           select r.result_payload from execution_result r
            where r.partition_key = e.partition_key and r.execution_id = e.execution_id) end) as result_payload,
         e.result_encoding, e.failure_reason, e.failure_category, e.cancellation_reason, e.cancelled_by,
         e.blocking_detail, e.flow_id, e.instance_tag, e.last_capability_mismatch_at,
         e.last_hmac_validation_failed_at, e.progress_pct, e.progress_message, e.progress_updated_at, e.creator_identity,
         coalesce(e.input_payload, (
           select i.input_payload from execution_input i
            where i.partition_key = e.partition_key and i.execution_id = e.execution_id)) as input_payload,
         e.payload_encoding, e.policy
    from execution e
    left join queue q on q.queue_no = e.queue_no
    left join kind k on k.kind_no = q.kind_no
    left join lateral (
         select e.lease_id, e.claim_no, e.worker_no, e.claimed_at, coalesce(c.renewed_at, e.lease_renewed_at) as lease_renewed_at,
                greatest(e.lease_expires_at, c.expires_at) as lease_expires_at,
                case when c.renewed_at is null then e.lease_expires_at - e.claimed_at else c.expires_at - c.renewed_at end as lease_ttl_ms
           from (values (true)) one_row
           left join claim c on c.partition_key = e.partition_key and c.claim_no = e.claim_no
          where e.ownership_state <> 'unowned') o on true;

create table execution_tag (
  partition_key smallint not null,
  execution_id uuid not null,
  key text not null,
  value text not null,
  primary key (partition_key, execution_id, key));
create index execution_tag_find on execution_tag (key, left(value, 128));

-- The calls made under an idempotency key, kept until the key expires, so that a repeated call gets the same answer. A key is
-- unique within its scope: the namespace and lane of a submission, the execution of a suspend, the waitpoint of a signal. The
-- row of a submission may outlive its execution, so it holds the values that a repeat is compared with: the kind, the encoding,
-- and the first 16 bytes of the SHA-256 of the payload and of the policy's JSON (empty for the default policy). The outcome of
-- a suspend contains tokens: protect it like the table waitpoint.
create table idempotency_key (
  -- For a submission, the partition of its lane; an id given by the caller may place the execution in another one.
  partition_key smallint not null,
  operation keyed_operation not null,
  scope uuid not null,
  key text not null,
  expires_at bigint not null,
  -- The execution that was submitted or suspended, or the signal.
  subject_partition smallint not null,
  subject_id uuid not null,
  execution_kind text,
  payload_encoding text,
  payload_digest bytea,
  policy_digest bytea,
  attempt_index int,
  outcome jsonb,
  primary key (partition_key, operation, scope, key));
create index idempotency_key_due on idempotency_key (expires_at);
-- The scope of a submission's key.
create function ff_scope(int, int) returns uuid language sql immutable parallel safe
  return (lpad(to_hex($1), 16, '0') || lpad(to_hex($2), 16, '0'))::uuid;

-- Attempts that were followed by another one, with their outcome; the reason and the predecessor of an attempt that follows
-- another, as soon as it is scheduled; and the times of an attempt that was parked. The latest attempt is on the row of the
-- execution; the view attempt_all shows all attempts.
create table attempt (
  partition_key smallint not null,
  execution_id uuid not null,
  attempt_index int not null,
  attempt_state attempt_lifecycle not null,
  attempt_id uuid,
  attempt_type attempt_type,
  started_at bigint,
  suspended_at bigint,
  resumed_at bigint,
  ended_at bigint,
  lease_id uuid,
  lease_epoch bigint,
  worker_no int,
  failure_reason text,
  failure_category text,
  previous_attempt_index int,
  retry_reason text,
  reclaim_reason text,
  replay_reason text,
  replay_requested_by text,
  suspension_marker text,
  suspension_id uuid,
  usage jsonb,
  policy jsonb,
  primary key (partition_key, execution_id, attempt_index)
) with (autovacuum_vacuum_scale_factor = 0.05);

create view attempt_all as
  select partition_key, execution_id, attempt_index, attempt_id, attempt_type, attempt_state, started_at, suspended_at,
         resumed_at, ended_at, lease_id, lease_epoch, worker_no, failure_reason, failure_category, previous_attempt_index,
         retry_reason, reclaim_reason, replay_reason, replay_requested_by, suspension_marker, suspension_id, usage, policy
    from attempt
   where ended_at is not null
  union all
  -- The latest attempt, unless its row in attempt has ended: then the execution waits, or ended waiting, for the next attempt.
  select e.partition_key, e.execution_id, e.attempt_count - 1, coalesce(e.attempt_id, e.lease_id), e.attempt_type,
         case
           when e.lifecycle_phase = 'active' then 'started'
           when e.lifecycle_phase <> 'terminal' then 'suspended'
           when e.terminal_outcome = 'success' then 'ended_success'
           when e.terminal_outcome = 'cancelled' then 'ended_cancelled'
           else 'ended_failure' end::attempt_lifecycle,
         coalesce(a.started_at, e.claimed_at), a.suspended_at,
         case when e.lease_id is not null and a.suspended_at is not null then e.claimed_at else a.resumed_at end,
         case when e.lifecycle_phase = 'terminal' then e.last_transition_at end,
         coalesce(e.lease_id, a.lease_id), e.lease_epoch, case when e.lease_id is not null then e.worker_no else a.worker_no end,
         case
           when e.lifecycle_phase <> 'terminal' then null
           when e.terminal_outcome = 'cancelled' then 'cancelled: ' || e.cancellation_reason
           else e.failure_reason end,
         case when e.lifecycle_phase = 'terminal' then e.failure_category end,
         a.previous_attempt_index, a.retry_reason, a.reclaim_reason, a.replay_reason, a.replay_requested_by,
         case when e.lifecycle_phase in ('runnable', 'suspended') then a.suspension_marker end,
         case when e.lifecycle_phase in ('runnable', 'suspended') then a.suspension_id end, a.usage, a.policy
    from execution e
    left join attempt a on a.partition_key = e.partition_key and a.execution_id = e.execution_id
                       and a.attempt_index = e.attempt_count - 1
   where coalesce(e.attempt_id, e.lease_id) is not null and a.ended_at is null;

-- The events of all feeds. The end of an execution without a lease has the kind ended; the release of a lease that also ends
-- the execution is one row. Events of several executions that differ only in the ids of executions and leases share one row.
create table event (
  event_id bigint generated always as identity,
  xid xid8 not null default pg_current_xact_id(),
  at bigint not null,
  lease_epoch bigint,
  -- Either execution_id and lease_id of one execution, or the arrays of several.
  execution_id uuid,
  lease_id uuid,
  execution_ids uuid[],
  lease_ids uuid[],
  -- Null if it equals the lease id.
  attempt_id uuid,
  kind event_kind not null,
  namespace_no int not null,
  attempt_index int,
  worker_no int,
  partition_key smallint not null,
  outcome smallint,
  reason text,
  flow_id uuid,
  instance_tag text,
  details jsonb,
  constraint event_is_of_one_or_many check ((execution_id is null) <> (execution_ids is null)),
  -- Rare events must be found by their execution, so they are not shared.
  constraint event_of_many_is_common check (execution_ids is null or kind in ('acquired', 'renewed', 'released'))
) partition by range (at);
alter table event alter execution_ids set storage external, alter lease_ids set storage external;
create table event_default partition of event default;
create index event_feed on event (xid, event_id);
-- Rare events are found by their kind, and by their execution: together with its attempts they are its timeline.
create index event_rare_feed on event (kind, xid, event_id) where kind not in ('acquired', 'renewed', 'released', 'ended');
create index event_rare_execution on event (execution_id, event_id) where kind not in ('acquired', 'renewed', 'released', 'ended');

-- One row for each event of each execution, in the order (xid, event_id, nth).
create view event_each as
  select e.event_id, m.nth, e.xid, e.at, e.kind, e.partition_key, coalesce(e.execution_id, m.execution_id) as execution_id,
         e.namespace_no, e.attempt_index, coalesce(e.lease_id, m.lease_id) as lease_id, e.lease_epoch,
         coalesce(e.attempt_id, e.lease_id, m.lease_id) as attempt_id, e.worker_no, e.outcome, e.reason, e.flow_id, e.instance_tag,
         e.details
    from event e
    left join lateral unnest(e.execution_ids, e.lease_ids) with ordinality as m(execution_id, lease_id, nth) on true;

-- The keys that sign grants and waitpoint tokens: one signs, older ones verify until their grace period ends.
create table signing_key (
  kid text primary key,
  secret bytea not null,
  is_current boolean not null,
  installed_at bigint not null,
  expires_at bigint,
  constraint signing_key_current_lasts check (not is_current or expires_at is null));
create unique index signing_key_current on signing_key (is_current) where is_current;

create table claim_grant (
  partition_key smallint not null,
  execution_id uuid not null,
  grant_id bytea not null,
  kind text not null constraint claim_grant_kind check (kind in ('claim', 'reclaim')),
  worker_id text not null,
  worker_instance_id text not null,
  lane_no int not null,
  worker_capabilities text[] not null default '{}',
  capability_hash text,
  route_snapshot jsonb,
  admission_summary text,
  issued_at bigint not null,
  expires_at bigint not null,
  primary key (partition_key, execution_id));
create index claim_grant_due on claim_grant (expires_at);

create table worker (
  partition_key smallint not null,
  namespace text not null,
  worker_instance_id text not null,
  worker_id text not null,
  lanes text[] not null,
  capabilities text[] not null,
  -- Null means any kind.
  kinds text[],
  -- Whether it runs executions of every namespace, or only those of its own.
  serves_all_namespaces boolean not null,
  last_heartbeat_at bigint not null,
  liveness_ttl_ms bigint not null,
  -- When the registration expires unless a heartbeat renews it.
  lapses_at bigint not null generated always as (last_heartbeat_at + liveness_ttl_ms) stored,
  registered_at bigint not null,
  primary key (partition_key, namespace, worker_instance_id));
create index worker_due on worker (lapses_at);
create index worker_list on worker (namespace collate "C", worker_instance_id collate "C");

create table worker_event (
  partition_key smallint not null,
  namespace text not null,
  worker_instance_id text not null,
  at bigint not null,
  kind text not null constraint worker_event_kind check (kind in ('registered', 'heartbeat', 'marked_dead', 'ttl_swept')),
  worker_id text not null,
  reason text,
  primary key (partition_key, namespace, worker_instance_id, at, kind));
create index worker_event_age on worker_event (at);
