-- What all migrations lead to, to read and to compare. Written by: python -m flowfabric.db.dump

create type attempt_lifecycle as enum ('created', 'started', 'suspended', 'ended_success', 'ended_failure', 'ended_cancelled', 'interrupted_reclaimed');

create type attempt_state as enum ('none', 'pending_first_attempt', 'running_attempt', 'attempt_interrupted', 'pending_retry_attempt', 'pending_replay_attempt', 'attempt_terminal');

create type attempt_type as enum ('initial', 'retry', 'reclaim', 'replay', 'fallback');

create type blocking_reason as enum ('none', 'waiting_for_worker', 'waiting_for_retry_backoff', 'waiting_for_resume_delay', 'waiting_for_delay', 'waiting_for_signal', 'waiting_for_approval', 'waiting_for_callback', 'waiting_for_tool_result', 'waiting_for_children', 'waiting_for_budget', 'waiting_for_quota', 'waiting_for_capable_worker', 'waiting_for_locality_match', 'paused_by_operator', 'paused_by_policy', 'paused_by_flow_cancel');

create type eligibility_state as enum ('eligible_now', 'not_eligible_until_time', 'blocked_by_dependencies', 'blocked_by_budget', 'blocked_by_quota', 'blocked_by_route', 'blocked_by_lane_state', 'blocked_by_operator', 'not_applicable');

create type lane_state as enum ('active', 'paused', 'draining', 'disabled');

create type lifecycle_phase as enum ('submitted', 'runnable', 'active', 'suspended', 'terminal');

create type ownership_state as enum ('unowned', 'leased', 'lease_expired_reclaimable', 'lease_revoked');

create type public_state as enum ('waiting', 'delayed', 'rate_limited', 'waiting_children', 'active', 'suspended', 'resumable', 'completed', 'failed', 'cancelled', 'expired', 'skipped');

create type terminal_outcome as enum ('none', 'success', 'failed', 'cancelled', 'expired', 'skipped');

create type waitpoint_state as enum ('pending', 'active', 'closed', 'expired');

create function ff_confirm() returns boolean language sql volatile
RETURN CASE WHEN (current_setting('synchronous_standby_names'::text) = ''::text) THEN true ELSE (pg_logical_emit_message(true, 'flowfabric'::text, ''::text) IS NOT NULL) END;

create function ff_input(integer, integer, bigint, smallint, uuid) returns SETOF execution_input language sql stable parallel safe
as $body$
  select * from execution_input i
   where i.namespace_no = $1 and i.lane_no = $2 and i.created_at = $3 and i.partition_key = $4 and i.execution_id = $5 limit 1
$body$;

create function ff_now() returns bigint language sql volatile parallel safe
RETURN ((EXTRACT(epoch FROM clock_timestamp()) * (1000)::numeric))::bigint;

create function ff_silent_sessions(bigint) returns SETOF integer language sql volatile
BEGIN ATOMIC
 SELECT pg_stat_activity.pid
    FROM pg_stat_activity
   WHERE ((pg_stat_activity.datname = current_database()) AND (pg_stat_activity.usename = CURRENT_USER) AND (pg_stat_activity.application_name = 'flowfabric'::text) AND (pg_stat_activity.state = 'active'::text) AND (pg_stat_activity.wait_event_type = 'Client'::text) AND (pg_stat_activity.state_change <= (clock_timestamp() - make_interval(secs => ((($1)::numeric / 1000.0))::double precision))));
END;

create sequence execution_sequence as bigint start 1 increment 1 minvalue 1 maxvalue 9223372036854775807 cache 1;

create table attempt (
  partition_key smallint not null,
  execution_id uuid not null,
  attempt_index integer not null,
  attempt_id uuid not null,
  attempt_type attempt_type not null,
  attempt_state attempt_lifecycle not null,
  started_at bigint not null,
  suspended_at bigint,
  resumed_at bigint,
  ended_at bigint,
  lease_id uuid,
  lease_epoch bigint not null,
  worker_no integer,
  result_payload bytea,
  result_encoding text,
  failure_reason text,
  failure_category text,
  previous_attempt_index integer,
  retry_reason text,
  reclaim_reason text,
  replay_reason text,
  replay_requested_by text,
  suspension_marker text,
  suspension_id uuid,
  usage jsonb,
  policy jsonb,
  constraint attempt_pkey PRIMARY KEY (partition_key, execution_id, attempt_index))
  with (autovacuum_vacuum_scale_factor=0.05);

create table capability_set (
  capability_set_no integer not null generated always as identity,
  required text[] not null,
  digest bytea not null,
  constraint capability_set_pkey PRIMARY KEY (capability_set_no),
  constraint capability_set_digest_key UNIQUE (digest));

create table claim_grant (
  partition_key smallint not null,
  execution_id uuid not null,
  grant_id bytea not null,
  kind text not null,
  worker_id text not null,
  worker_instance_id text not null,
  lane_no integer not null,
  worker_capabilities text[] not null default '{}'::text[],
  capability_hash text,
  route_snapshot jsonb,
  admission_summary text,
  issued_at bigint not null,
  expires_at bigint not null,
  constraint claim_grant_pkey PRIMARY KEY (partition_key, execution_id),
  constraint claim_grant_kind_check CHECK (kind = ANY (ARRAY['claim'::text, 'reclaim'::text])));

create table configuration (
  only_row boolean not null default true,
  flow_partitions integer not null,
  budget_partitions integer not null,
  quota_partitions integer not null,
  constraint configuration_pkey PRIMARY KEY (only_row),
  constraint configuration_only_row_check CHECK (only_row));

create table event (
  event_id bigint not null generated always as identity,
  xid xid8 not null default pg_current_xact_id(),
  at bigint not null,
  execution_id uuid not null,
  partition_key smallint not null,
  kind smallint not null,
  namespace_no integer not null,
  attempt_index integer,
  worker_no integer,
  lease_epoch bigint,
  lease_id uuid,
  attempt_id uuid,
  outcome smallint,
  reason text,
  flow_id uuid,
  instance_tag text,
  details jsonb) partition by RANGE (at);

create table execution (
  partition_key smallint not null,
  execution_id uuid not null,
  place bigint not null,
  queue_no integer not null,
  namespace_no integer not null,
  lane_no integer not null,
  priority smallint not null,
  lifecycle_phase lifecycle_phase not null,
  ownership_state ownership_state not null default 'unowned'::ownership_state,
  eligibility_state eligibility_state not null,
  blocking_reason blocking_reason not null,
  terminal_outcome terminal_outcome not null default 'none'::terminal_outcome,
  attempt_state attempt_state not null,
  public_state public_state not null generated always as (
CASE lifecycle_phase
    WHEN 'terminal'::lifecycle_phase THEN
    CASE terminal_outcome
        WHEN 'success'::terminal_outcome THEN 'completed'::public_state
        WHEN 'cancelled'::terminal_outcome THEN 'cancelled'::public_state
        WHEN 'expired'::terminal_outcome THEN 'expired'::public_state
        WHEN 'skipped'::terminal_outcome THEN 'skipped'::public_state
        ELSE 'failed'::public_state
    END
    WHEN 'suspended'::lifecycle_phase THEN 'suspended'::public_state
    WHEN 'active'::lifecycle_phase THEN 'active'::public_state
    WHEN 'runnable'::lifecycle_phase THEN
    CASE eligibility_state
        WHEN 'not_eligible_until_time'::eligibility_state THEN 'delayed'::public_state
        WHEN 'blocked_by_dependencies'::eligibility_state THEN 'waiting_children'::public_state
        WHEN 'blocked_by_budget'::eligibility_state THEN 'rate_limited'::public_state
        WHEN 'blocked_by_quota'::eligibility_state THEN 'rate_limited'::public_state
        WHEN 'eligible_now'::eligibility_state THEN
        CASE
            WHEN attempt_state = 'attempt_interrupted'::attempt_state THEN 'resumable'::public_state
            ELSE 'waiting'::public_state
        END
        ELSE 'waiting'::public_state
    END
    ELSE 'waiting'::public_state
END) stored,
  lease_epoch bigint not null default 0,
  lease_id uuid,
  attempt_id uuid,
  attempt_type attempt_type,
  attempt_count integer not null default 0,
  attempt_stored boolean not null default false,
  worker_no integer,
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
CASE
    WHEN lifecycle_phase <> 'terminal'::lifecycle_phase THEN LEAST(
    CASE ownership_state
        WHEN 'leased'::ownership_state THEN lease_expires_at
        ELSE NULL::bigint
    END,
    CASE eligibility_state
        WHEN 'not_eligible_until_time'::eligibility_state THEN GREATEST(delay_until, last_transition_at)
        ELSE NULL::bigint
    END,
    CASE lifecycle_phase
        WHEN 'active'::lifecycle_phase THEN attempt_timeout_at
        ELSE NULL::bigint
    END,
    CASE
        WHEN lifecycle_phase = 'suspended'::lifecycle_phase AND suspension_timeout_at IS NOT NULL THEN GREATEST(suspension_timeout_at, last_transition_at)
        ELSE NULL::bigint
    END,
    CASE
        WHEN deadline_at IS NOT NULL THEN GREATEST(deadline_at, last_transition_at)
        ELSE NULL::bigint
    END)
    ELSE NULL::bigint
END) stored,
  retry_count integer not null default 0,
  replay_count integer not null default 0,
  reclaim_count integer not null default 0,
  started_at bigint,
  completed_at bigint,
  created_at bigint not null,
  last_transition_at bigint not null,
  last_mutation_at bigint not null,
  flow_id uuid,
  instance_tag text,
  retention_ms bigint,
  remaining_attempt_timeout_ms bigint,
  attempt_policy jsonb,
  blocking_detail text,
  failure_reason text,
  cancellation_reason text,
  cancelled_by text,
  previous_attempt_index integer,
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
  last_hmac_validation_failed_at bigint,
  constraint execution_pkey PRIMARY KEY (partition_key, execution_id),
  constraint execution_check CHECK (ownership_state = 'unowned'::ownership_state OR lifecycle_phase = 'active'::lifecycle_phase),
  constraint execution_check1 CHECK ((terminal_outcome <> 'none'::terminal_outcome) = (lifecycle_phase = 'terminal'::lifecycle_phase)),
  constraint execution_check2 CHECK ((eligibility_state <> 'not_applicable'::eligibility_state) = (lifecycle_phase = 'runnable'::lifecycle_phase)),
  constraint execution_check3 CHECK ((completed_at IS NOT NULL) = (lifecycle_phase = 'terminal'::lifecycle_phase)),
  constraint execution_lifecycle_phase_check CHECK (lifecycle_phase <> 'submitted'::lifecycle_phase),
  constraint execution_priority_check CHECK (priority >= 0 AND priority <= 9000))
  with (autovacuum_analyze_scale_factor=0.05, autovacuum_vacuum_insert_scale_factor=0.1, autovacuum_vacuum_scale_factor=0.02, fillfactor=80);

create table execution_input (
  namespace_no integer not null,
  lane_no integer not null,
  created_at bigint not null,
  partition_key smallint not null,
  execution_id uuid not null,
  has_tags boolean not null,
  execution_kind text not null,
  creator_identity text not null,
  input_payload bytea not null,
  payload_encoding text,
  policy jsonb,
  constraint execution_input_pkey PRIMARY KEY (namespace_no, lane_no, created_at, partition_key, execution_id))
  with (autovacuum_vacuum_scale_factor=0.05);

create table execution_tag (
  partition_key smallint not null,
  execution_id uuid not null,
  key text not null,
  value text not null,
  constraint execution_tag_pkey PRIMARY KEY (partition_key, execution_id, key));

create table idempotency (
  partition_key smallint not null,
  namespace_no integer not null,
  lane_no integer not null,
  idempotency_key text not null,
  execution_partition smallint not null,
  execution_id uuid not null,
  execution_kind text not null,
  payload_encoding text,
  payload_digest bytea not null,
  policy_digest bytea not null,
  expires_at bigint not null,
  constraint idempotency_pkey PRIMARY KEY (partition_key, namespace_no, lane_no, idempotency_key));

create table kind (
  kind_no integer not null generated always as identity,
  execution_kind text not null,
  digest bytea not null,
  constraint kind_pkey PRIMARY KEY (kind_no),
  constraint kind_digest_key UNIQUE (digest));

create table lane (
  lane_no integer not null generated always as identity,
  lane_id text not null,
  state lane_state not null default 'active'::lane_state,
  registered_at bigint not null,
  registered_by text not null,
  constraint lane_pkey PRIMARY KEY (lane_no),
  constraint lane_lane_id_key UNIQUE (lane_id));

create table namespace (
  namespace_no integer not null generated always as identity,
  namespace text not null,
  constraint namespace_pkey PRIMARY KEY (namespace_no),
  constraint namespace_namespace_key UNIQUE (namespace));

create table queue (
  queue_no integer not null generated always as identity,
  lane_no integer not null,
  kind_no integer not null,
  namespace_no integer not null,
  capability_set_no integer not null,
  admission_key_no integer not null default 0,
  constraint queue_pkey PRIMARY KEY (queue_no),
  constraint queue_capability_set_no_fkey FOREIGN KEY (capability_set_no) REFERENCES capability_set(capability_set_no),
  constraint queue_kind_no_fkey FOREIGN KEY (kind_no) REFERENCES kind(kind_no),
  constraint queue_lane_no_fkey FOREIGN KEY (lane_no) REFERENCES lane(lane_no),
  constraint queue_lane_no_kind_no_namespace_no_capability_set_no_admiss_key UNIQUE (lane_no, kind_no, namespace_no, capability_set_no, admission_key_no),
  constraint queue_namespace_no_fkey FOREIGN KEY (namespace_no) REFERENCES namespace(namespace_no));

create table schema_migration (
  number integer not null,
  name text not null,
  checksum text not null,
  compatible boolean not null,
  applied_at timestamp with time zone not null,
  applied_by text not null,
  constraint schema_migration_pkey PRIMARY KEY (number));

create table signal (
  partition_key smallint not null,
  execution_id uuid not null,
  signal_id uuid not null,
  sequence bigint not null generated always as identity,
  suspension_id uuid,
  waitpoint_id uuid,
  waitpoint_key text not null,
  signal_name text not null,
  signal_category text not null,
  source_type text not null,
  source_identity text not null,
  correlation_id text,
  idempotency_key text,
  target_scope text not null,
  created_at bigint not null,
  accepted_at bigint not null,
  effect text not null,
  disposition text not null,
  payload bytea,
  payload_encoding text,
  constraint signal_pkey PRIMARY KEY (partition_key, execution_id, signal_id));

create table signal_key (
  partition_key smallint not null,
  waitpoint_id uuid not null,
  idempotency_key text not null,
  signal_id uuid not null,
  expires_at bigint not null,
  constraint signal_key_pkey PRIMARY KEY (partition_key, waitpoint_id, idempotency_key));

create table signing_key (
  kid text not null,
  secret bytea not null,
  is_current boolean not null,
  installed_at bigint not null,
  expires_at bigint,
  constraint signing_key_pkey PRIMARY KEY (kid),
  constraint signing_key_check CHECK (NOT is_current OR expires_at IS NULL));

create table suspend_key (
  partition_key smallint not null,
  execution_id uuid not null,
  idempotency_key text not null,
  attempt_index integer not null,
  outcome jsonb not null,
  expires_at bigint not null,
  constraint suspend_key_pkey PRIMARY KEY (partition_key, execution_id, idempotency_key));

create table suspension (
  partition_key smallint not null,
  execution_id uuid not null,
  suspension_id uuid not null,
  attempt_index integer not null,
  waitpoint_ids uuid[] not null,
  namespace_no integer not null,
  lane_no integer not null,
  reason_code text not null,
  requested_by text not null,
  suspended_at bigint not null,
  timeout_at bigint,
  timeout_behavior text,
  condition jsonb not null,
  resume_policy jsonb not null,
  continuation_metadata_pointer text,
  satisfier_ids uuid[] not null default '{}'::uuid[],
  satisfied_at bigint,
  closed_at bigint,
  close_reason text,
  last_signal_at bigint,
  constraint suspension_pkey PRIMARY KEY (partition_key, execution_id),
  constraint suspension_check CHECK ((closed_at IS NULL) = (close_reason IS NULL)));

create table waitpoint (
  partition_key smallint not null,
  waitpoint_id uuid not null,
  execution_id uuid not null,
  attempt_index integer not null,
  suspension_id uuid,
  waitpoint_key text not null,
  token_kid text not null,
  token text not null,
  state waitpoint_state not null,
  required_signal_names text[] not null default '{}'::text[],
  created_at bigint not null,
  activated_at bigint,
  satisfied_at bigint,
  closed_at bigint,
  expires_at bigint,
  close_reason text,
  signal_count integer not null default 0,
  matched_signal_count integer not null default 0,
  last_signal_at bigint,
  constraint waitpoint_pkey PRIMARY KEY (partition_key, waitpoint_id));

create table worker (
  partition_key smallint not null,
  namespace text not null,
  worker_instance_id text not null,
  worker_id text not null,
  lanes text[] not null,
  capabilities text[] not null,
  kinds text[],
  serves_all_namespaces boolean not null,
  last_heartbeat_at bigint not null,
  liveness_ttl_ms bigint not null,
  lapses_at bigint not null generated always as (last_heartbeat_at + liveness_ttl_ms) stored,
  registered_at bigint not null,
  constraint worker_pkey PRIMARY KEY (partition_key, namespace, worker_instance_id));

create table worker_event (
  partition_key smallint not null,
  namespace text not null,
  worker_instance_id text not null,
  at bigint not null,
  kind text not null,
  worker_id text not null,
  reason text,
  constraint worker_event_pkey PRIMARY KEY (partition_key, namespace, worker_instance_id, at, kind),
  constraint worker_event_kind_check CHECK (kind = ANY (ARRAY['registered'::text, 'heartbeat'::text, 'marked_dead'::text, 'ttl_swept'::text])));

create table worker_identity (
  worker_no integer not null generated always as identity,
  worker_id text not null,
  worker_instance_id text not null,
  constraint worker_identity_pkey PRIMARY KEY (worker_no),
  constraint worker_identity_worker_id_worker_instance_id_key UNIQUE (worker_id, worker_instance_id));

create table event_default partition of event DEFAULT;

CREATE INDEX claim_grant_due ON claim_grant USING btree (expires_at);

CREATE INDEX event_feed ON ONLY event USING btree (xid, event_id);

CREATE INDEX execution_blocked ON execution USING btree (eligibility_state, last_transition_at) WHERE eligibility_state <> ALL (ARRAY['eligible_now'::eligibility_state, 'not_applicable'::eligibility_state]);

CREATE INDEX execution_claim ON execution USING btree (queue_no, place) WHERE eligibility_state = 'eligible_now'::eligibility_state OR (ownership_state = ANY (ARRAY['lease_expired_reclaimable'::ownership_state, 'lease_revoked'::ownership_state]));

CREATE INDEX execution_due ON execution USING btree (due_at, ownership_state) WHERE due_at IS NOT NULL;

CREATE INDEX execution_lost ON execution USING btree (ownership_state, lease_expires_at) WHERE ownership_state = ANY (ARRAY['lease_expired_reclaimable'::ownership_state, 'lease_revoked'::ownership_state]);

CREATE INDEX execution_resumable ON execution USING btree (last_transition_at) WHERE eligibility_state = 'eligible_now'::eligibility_state AND attempt_state = 'attempt_interrupted'::attempt_state;

CREATE INDEX execution_retained ON execution USING btree (retain_until) WHERE retain_until IS NOT NULL;

CREATE INDEX execution_unhappy ON execution USING btree (terminal_outcome, completed_at) WHERE terminal_outcome = ANY (ARRAY['failed'::terminal_outcome, 'cancelled'::terminal_outcome, 'expired'::terminal_outcome, 'skipped'::terminal_outcome]);

CREATE INDEX execution_tag_find ON execution_tag USING btree (key, "left"(value, 128), execution_id);

CREATE INDEX idempotency_due ON idempotency USING btree (expires_at);

CREATE INDEX signal_of_waitpoint ON signal USING btree (waitpoint_id, sequence);

CREATE INDEX signal_key_due ON signal_key USING btree (expires_at);

CREATE UNIQUE INDEX signing_key_current ON signing_key USING btree (is_current) WHERE is_current;

CREATE INDEX suspend_key_due ON suspend_key USING btree (expires_at);

CREATE INDEX suspension_list ON suspension USING btree (suspended_at) WHERE close_reason IS NULL;

CREATE INDEX waitpoint_due ON waitpoint USING btree (expires_at) WHERE activated_at IS NULL AND closed_at IS NULL;

CREATE INDEX waitpoint_of_execution ON waitpoint USING btree (execution_id);

CREATE INDEX worker_due ON worker USING btree (lapses_at);

CREATE INDEX worker_list ON worker USING btree (namespace COLLATE "C", worker_instance_id COLLATE "C");

CREATE INDEX worker_event_age ON worker_event USING btree (at);

create view attempt_all as
 SELECT a.partition_key,
    a.execution_id,
    a.attempt_index,
    a.attempt_id,
    a.attempt_type,
    a.attempt_state,
    a.started_at,
    a.suspended_at,
    a.resumed_at,
    a.ended_at,
    a.lease_id,
    a.lease_epoch,
    a.worker_no,
    a.failure_reason,
    a.failure_category,
    a.previous_attempt_index,
    a.retry_reason,
    a.reclaim_reason,
    a.replay_reason,
    a.replay_requested_by,
    a.suspension_marker,
    a.suspension_id,
    a.usage,
    a.policy
   FROM attempt a
  WHERE NOT (EXISTS ( SELECT
           FROM execution e
          WHERE e.partition_key = a.partition_key AND e.execution_id = a.execution_id AND e.attempt_count = (a.attempt_index + 1) AND e.lifecycle_phase = 'active'::lifecycle_phase))
UNION ALL
 SELECT e.partition_key,
    e.execution_id,
    e.attempt_count - 1 AS attempt_index,
    e.attempt_id,
    e.attempt_type,
    'started'::attempt_lifecycle AS attempt_state,
    COALESCE(a.started_at, e.claimed_at) AS started_at,
    a.suspended_at,
        CASE
            WHEN a.started_at IS NOT NULL THEN e.claimed_at
            ELSE NULL::bigint
        END AS resumed_at,
    NULL::bigint AS ended_at,
    e.lease_id,
    e.lease_epoch,
    e.worker_no,
    NULL::text AS failure_reason,
    NULL::text AS failure_category,
    e.previous_attempt_index,
    e.retry_reason,
    e.reclaim_reason,
    e.replay_reason,
    e.replay_requested_by,
    NULL::text AS suspension_marker,
    NULL::uuid AS suspension_id,
    a.usage,
    COALESCE(a.policy, e.attempt_policy) AS policy
   FROM execution e
     LEFT JOIN attempt a ON a.partition_key = e.partition_key AND a.execution_id = e.execution_id AND a.attempt_index = (e.attempt_count - 1)
  WHERE e.lifecycle_phase = 'active'::lifecycle_phase;
