-- compatible: no
-- The core: lanes, queues, executions, attempts, events, grants and the worker registry.

create function ff_now() returns bigint language sql volatile parallel safe
  return (extract(epoch from clock_timestamp()) * 1000)::bigint;

-- For a statement whose answer rests on rows it has only read: with a synchronous standby, its commit then waits until the
-- standby has them. A primary that restarts shows rows whose commit the standby has not confirmed, and a failover would
-- lose what a caller was told.
create function ff_confirm() returns boolean language sql volatile
  return case when current_setting('synchronous_standby_names') = '' then true
              else pg_logical_emit_message(true, 'flowfabric', '') is not null end;

-- Sessions of this user that have been waiting for their clients for so many milliseconds in the middle of a statement.
-- None of null milliseconds.
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
create type lane_state as enum ('active', 'paused', 'draining', 'disabled');

-- Written once at the first start; a process configured otherwise refuses to run.
create table configuration (
  only_row boolean primary key default true check (only_row),
  flow_partitions int not null,
  budget_partitions int not null,
  quota_partitions int not null);

-- Small global tables, cached in every process: long texts never sit on hot rows.
create table namespace (
  namespace_no int generated always as identity primary key,
  namespace text not null unique);
create table lane (
  lane_no int generated always as identity primary key,
  lane_id text not null unique,
  state lane_state not null default 'active',
  registered_at bigint not null,
  registered_by text not null);
create table capability_set (
  capability_set_no int generated always as identity primary key,
  required text[] not null,
  -- Of the sorted tokens joined by commas: a long set would not fit an index entry.
  digest bytea not null unique);
create table kind (
  kind_no int generated always as identity primary key,
  execution_kind text not null,
  -- A long kind would not fit an index entry.
  digest bytea not null unique);
create table worker_identity (
  worker_no int generated always as identity primary key,
  worker_id text not null,
  worker_instance_id text not null,
  unique (worker_id, worker_instance_id));

-- A queue is lane × kind × namespace × capability set × admission key (0 = none): claims walk queues, they never filter
-- rows. A claim that names kinds finds its queues by the first two columns of the key.
create table queue (
  queue_no int generated always as identity primary key,
  lane_no int not null references lane,
  kind_no int not null references kind,
  namespace_no int not null references namespace,
  capability_set_no int not null references capability_set,
  admission_key_no int not null default 0,
  unique (lane_no, kind_no, namespace_no, capability_set_no, admission_key_no));

-- Creation order; one number a draw, so that it holds across connections.
create sequence execution_sequence as bigint;

-- The hot row: every byte here is written again at each move. What is written once stands in execution_input and attempt.
create table execution (
  partition_key smallint not null,
  execution_id uuid not null,
  -- Order of claiming within a queue: (9000 - priority) in the bits above 48, creation order below.
  place bigint not null,
  queue_no int not null,
  namespace_no int not null,
  lane_no int not null,
  priority smallint not null check (priority between 0 and 9000),
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
  lease_epoch bigint not null default 0,
  lease_id uuid,
  attempt_id uuid,
  attempt_type attempt_type,
  attempt_count int not null default 0,
  -- Whether the current attempt has its row already, because it was parked before.
  attempt_stored boolean not null default false,
  worker_no int,
  claimed_at bigint,
  lease_expires_at bigint,
  lease_renewed_at bigint,
  granted_until bigint,
  delay_until bigint,
  deadline_at bigint,
  attempt_timeout_at bigint,
  suspension_timeout_at bigint,
  retain_until bigint,
  due_at bigint generated always as (
    case when lifecycle_phase <> 'terminal' then least(
      case ownership_state when 'leased' then lease_expires_at end,
      -- What is set into the past is due from when it was set: sweeps need not look for it further back.
      case eligibility_state when 'not_eligible_until_time' then greatest(delay_until, last_transition_at) end,
      case lifecycle_phase when 'active' then attempt_timeout_at end,
      case when lifecycle_phase = 'suspended' and suspension_timeout_at is not null then greatest(suspension_timeout_at, last_transition_at) end,
      case when deadline_at is not null then greatest(deadline_at, last_transition_at) end) end) stored,
  retry_count int not null default 0,
  replay_count int not null default 0,
  reclaim_count int not null default 0,
  started_at bigint,
  completed_at bigint,
  created_at bigint not null,
  last_transition_at bigint not null,
  last_mutation_at bigint not null,
  -- From here on null on the hot path.
  flow_id uuid,
  instance_tag text,
  retention_ms bigint,
  remaining_attempt_timeout_ms bigint,
  attempt_policy jsonb,
  blocking_detail text,
  failure_reason text,
  cancellation_reason text,
  cancelled_by text,
  -- Lineage of the next attempt while it is pending, of the current one while it runs.
  previous_attempt_index int,
  retry_reason text,
  reclaim_reason text,
  replay_reason text,
  replay_requested_by text,
  lease_expired_at bigint,
  lease_revoked_at bigint,
  lease_revoke_reason text,
  last_capability_mismatch_at bigint,
  progress_pct smallint,
  progress_message text,
  progress_updated_at bigint,
  primary key (partition_key, execution_id),
  check (lifecycle_phase <> 'submitted'),
  check (ownership_state = 'unowned' or lifecycle_phase = 'active'),
  check ((terminal_outcome <> 'none') = (lifecycle_phase = 'terminal')),
  check ((eligibility_state <> 'not_applicable') = (lifecycle_phase = 'runnable')),
  check ((completed_at is not null) = (lifecycle_phase = 'terminal'))
) with (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.1,
        autovacuum_analyze_scale_factor = 0.05);
create index execution_claim on execution (queue_no, place)
  where eligibility_state = 'eligible_now' or ownership_state in ('lease_expired_reclaimable', 'lease_revoked');
-- One index for every timer of live work: leases, delays, timeouts, deadlines. Who asks for leases alone passes over the
-- others without a look at their rows.
create index execution_due on execution (due_at, ownership_state) where due_at is not null;
-- Ended work waits apart, so that a long backlog of it never stands before a live timer.
create index execution_retained on execution (retain_until) where retain_until is not null;
-- What follows serves lists and operators; nothing that waits for a worker, runs under its lease or has succeeded is in it.
create index execution_blocked on execution (eligibility_state, last_transition_at)
  where eligibility_state not in ('eligible_now', 'not_applicable');
create index execution_resumable on execution (last_transition_at)
  where eligibility_state = 'eligible_now' and attempt_state = 'attempt_interrupted';
create index execution_lost on execution (ownership_state, lease_expires_at)
  where ownership_state in ('lease_expired_reclaimable', 'lease_revoked');
create index execution_unhappy on execution (terminal_outcome, completed_at)
  where terminal_outcome in ('failed', 'cancelled', 'expired', 'skipped');

create table execution_input (
  namespace_no int not null,
  lane_no int not null,
  created_at bigint not null,
  partition_key smallint not null,
  execution_id uuid not null,
  has_tags boolean not null,
  execution_kind text not null,
  creator_identity text not null,
  input_payload bytea not null,
  payload_encoding text,
  policy jsonb,
  -- One index finds the input of an execution and leads through the lists, which merge the few pairs of a namespace and
  -- a lane; ids of one millisecond are sorted as texts when read.
  primary key (namespace_no, lane_no, created_at, partition_key, execution_id)
) with (autovacuum_vacuum_scale_factor = 0.05);
-- The input of an execution, looked up by all of its key and one at a time. The planner puts the body in its place; the
-- limit keeps it from walking the index with the inputs in the lead, which looks as good while the table is empty.
create function ff_input(int, int, bigint, smallint, uuid) returns setof execution_input language sql stable parallel safe
as $$
  select * from execution_input i
   where i.namespace_no = $1 and i.lane_no = $2 and i.created_at = $3 and i.partition_key = $4 and i.execution_id = $5 limit 1
$$;

create table execution_tag (
  partition_key smallint not null,
  execution_id uuid not null,
  key text not null,
  value text not null,
  primary key (partition_key, execution_id, key));
create index execution_tag_find on execution_tag (key, left(value, 128), execution_id);

-- A key counts for its namespace and lane. The entry outlives its execution, so it holds what a repeat is compared with:
-- the kind, the encoding, and the first 16 bytes of the SHA-256 of the payload and of the policy's JSON (empty for the
-- default policy).
create table idempotency (
  -- Of the lane; a caller's own id may put the execution into another partition.
  partition_key smallint not null,
  namespace_no int not null,
  lane_no int not null,
  idempotency_key text not null,
  execution_partition smallint not null,
  execution_id uuid not null,
  execution_kind text not null,
  payload_encoding text,
  payload_digest bytea not null,
  policy_digest bytea not null,
  expires_at bigint not null,
  primary key (partition_key, namespace_no, lane_no, idempotency_key));
create index idempotency_due on idempotency (expires_at);

-- Written when an attempt ends or first parks; the running attempt is the execution row (view attempt_all shows both).
create table attempt (
  partition_key smallint not null,
  execution_id uuid not null,
  attempt_index int not null,
  attempt_id uuid not null,
  attempt_type attempt_type not null,
  attempt_state attempt_lifecycle not null,
  started_at bigint not null,
  suspended_at bigint,
  resumed_at bigint,
  ended_at bigint,
  lease_id uuid,
  lease_epoch bigint not null,
  worker_no int,
  result_payload bytea,
  result_encoding text,
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
    from attempt a
   where not exists (
         select from execution e
          where e.partition_key = a.partition_key and e.execution_id = a.execution_id
            and e.attempt_count = a.attempt_index + 1 and e.lifecycle_phase = 'active')
  union all
  select e.partition_key, e.execution_id, e.attempt_count - 1, e.attempt_id, e.attempt_type, 'started',
         coalesce(a.started_at, e.claimed_at), a.suspended_at, case when a.started_at is not null then e.claimed_at end, null,
         e.lease_id, e.lease_epoch, e.worker_no, null, null, e.previous_attempt_index,
         e.retry_reason, e.reclaim_reason, e.replay_reason, e.replay_requested_by, null, null, a.usage,
         coalesce(a.policy, e.attempt_policy)
    from execution e
    left join attempt a on a.partition_key = e.partition_key and a.execution_id = e.execution_id
                       and a.attempt_index = e.attempt_count - 1
   where e.lifecycle_phase = 'active';

-- Every feed is this one table. kind 0 is an ending alone; a released lease and the ending it brings share one row.
create table event (
  event_id bigint generated always as identity,
  xid xid8 not null default pg_current_xact_id(),
  at bigint not null,
  execution_id uuid not null,
  partition_key smallint not null,
  kind smallint not null,
  namespace_no int not null,
  attempt_index int,
  worker_no int,
  lease_epoch bigint,
  lease_id uuid,
  -- Of the attempt, where it is not that of the lease: the lease that begins an attempt gives the attempt its id.
  attempt_id uuid,
  outcome smallint,
  reason text,
  flow_id uuid,
  instance_tag text,
  details jsonb
) partition by range (at);
create table event_default partition of event default;
create index event_feed on event (xid, event_id);

-- The keys that sign grants and waitpoint tokens: one signs, older ones verify until their grace ends.
create table signing_key (
  kid text primary key,
  secret bytea not null,
  is_current boolean not null,
  installed_at bigint not null,
  expires_at bigint,
  check (not is_current or expires_at is null));
create unique index signing_key_current on signing_key (is_current) where is_current;

create table claim_grant (
  partition_key smallint not null,
  execution_id uuid not null,
  grant_id bytea not null,
  kind text not null check (kind in ('claim', 'reclaim')),
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
  -- Null: any.
  kinds text[],
  -- Whether it takes the work of every namespace, or only that of its own.
  serves_all_namespaces boolean not null,
  last_heartbeat_at bigint not null,
  liveness_ttl_ms bigint not null,
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
  kind text not null check (kind in ('registered', 'heartbeat', 'marked_dead', 'ttl_swept')),
  worker_id text not null,
  reason text,
  primary key (partition_key, namespace, worker_instance_id, at, kind));
create index worker_event_age on worker_event (at);
