-- compatible: yes
-- Suspensions, their waitpoints and the signals that resume them.
-- checksum: 6800dd20721828c954da119cea009aa0f48cc35a3c13915a2b93fe345a12060c

create type waitpoint_state as enum ('pending', 'active', 'closed', 'expired');

-- The suspensions of executions, open and closed. The row of an execution names its latest one; only that can be open.
create table suspension (
  partition_key smallint not null,
  execution_id uuid not null,
  suspension_id uuid not null,
  attempt_index int not null,
  -- In the order of the bindings; reads of the execution show the first one.
  waitpoint_ids uuid[] not null,
  namespace_no int not null,
  lane_no int not null,
  reason_code text not null,
  requested_by text not null,
  suspended_at bigint not null,
  timeout_at bigint,
  timeout_behavior text,
  condition jsonb not null,
  resume_policy jsonb not null,
  continuation_metadata_pointer text,
  -- The signals that counted for the condition, in the order they were accepted; the last one satisfied it.
  satisfier_ids uuid[] not null default '{}',
  satisfied_at bigint,
  closed_at bigint,
  close_reason text,
  last_signal_at bigint,
  primary key (partition_key, execution_id, suspension_id),
  constraint suspension_closed_has_reason check ((closed_at is null) = (close_reason is null)));
-- Suspensions of the same millisecond are few and are sorted by id when they are read.
-- Indexes for lists and sweeps must not match the conditions of statements that look up a key: while a table is empty, the
-- planner considers any matching index as good as the primary key, and the plan is used later. So they have other columns.
create index suspension_list on suspension (suspended_at) where close_reason is null;

create table waitpoint (
  partition_key smallint not null,
  waitpoint_id uuid not null,
  execution_id uuid not null,
  attempt_index int not null,
  suspension_id uuid,
  waitpoint_key text not null,
  token_kid text not null,
  token text not null,
  state waitpoint_state not null,
  required_signal_names text[] not null default '{}',
  created_at bigint not null,
  activated_at bigint,
  satisfied_at bigint,
  closed_at bigint,
  expires_at bigint,
  close_reason text,
  signal_count int not null default 0,
  matched_signal_count int not null default 0,
  last_signal_at bigint,
  primary key (partition_key, waitpoint_id));
create index waitpoint_of_execution on waitpoint (execution_id);
-- The pending waitpoints.
create index waitpoint_due on waitpoint (expires_at) where activated_at is null and closed_at is null;

create table signal (
  partition_key smallint not null,
  execution_id uuid not null,
  signal_id uuid not null,
  -- The order of acceptance.
  sequence bigint generated always as identity,
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
  primary key (partition_key, execution_id, signal_id));
create index signal_of_waitpoint on signal (waitpoint_id, sequence);
