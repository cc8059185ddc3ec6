-- The schema after all migrations, for reading and comparing. Written by: python -m flowfabric.db.dump

create type attempt_lifecycle as enum ('created', 'started', 'suspended', 'ended_success', 'ended_failure', 'ended_cancelled', 'interrupted_reclaimed');

create type attempt_state as enum ('none', 'pending_first_attempt', 'running_attempt', 'attempt_interrupted', 'pending_retry_attempt', 'pending_replay_attempt', 'attempt_terminal');

create type attempt_type as enum ('initial', 'retry', 'reclaim', 'replay', 'fallback');

create type blocking_reason as enum ('none', 'waiting_for_worker', 'waiting_for_retry_backoff', 'waiting_for_resume_delay', 'waiting_for_delay', 'waiting_for_signal', 'waiting_for_approval', 'waiting_for_callback', 'waiting_for_tool_result', 'waiting_for_children', 'waiting_for_budget', 'waiting_for_quota', 'waiting_for_capable_worker', 'waiting_for_locality_match', 'paused_by_operator', 'paused_by_policy', 'paused_by_flow_cancel');

create type dependency_state as enum ('staged', 'unsatisfied', 'satisfied', 'impossible');

create type eligibility_state as enum ('eligible_now', 'not_eligible_until_time', 'blocked_by_dependencies', 'blocked_by_budget', 'blocked_by_quota', 'blocked_by_route', 'blocked_by_lane_state', 'blocked_by_operator', 'not_applicable');

create type event_kind as enum ('ended', 'acquired', 'renewed', 'released', 'expired', 'revoked', 'reclaimed', 'replay_initiated', 'operator_resumed', 'signal', 'operator_action', 'tag_attached', 'tag_cleared');

create type frame_mode as enum ('durable', 'summary', 'best_effort');

create type group_state as enum ('pending', 'satisfied', 'impossible');

create type keyed_operation as enum ('submit', 'suspend', 'signal', 'spend', 'settle');

create type lane_state as enum ('active', 'paused', 'draining', 'disabled');

create type lifecycle_phase as enum ('submitted', 'runnable', 'active', 'suspended', 'terminal');

create type ownership_state as enum ('unowned', 'leased', 'lease_expired_reclaimable', 'lease_revoked');

create type public_state as enum ('waiting', 'delayed', 'rate_limited', 'waiting_children', 'active', 'suspended', 'resumable', 'completed', 'failed', 'cancelled', 'expired', 'skipped');

create type terminal_outcome as enum ('none', 'success', 'failed', 'cancelled', 'expired', 'skipped');

create type timer_kind as enum ('delay', 'attempt_timeout', 'deadline', 'suspension_timeout');

create type waitpoint_state as enum ('pending', 'active', 'closed', 'expired');

create function ff_confirm() returns boolean language sql volatile
RETURN CASE WHEN (current_setting('synchronous_standby_names'::text) = ''::text) THEN true ELSE (pg_logical_emit_message(true, 'flowfabric'::text, ''::text) IS NOT NULL) END;

create function ff_ended_stream(s stream, epoch bigint, reason text, at bigint) returns TABLE(released_epoch bigint, closed_at bigint, closed_reason text, expires_at bigint, sweep_at bigint) language sql stable parallel safe
BEGIN ATOMIC
 SELECT ff_ended_stream.epoch AS epoch,
     c.closed_at,
         CASE
             WHEN (ff_ended_stream.reason = 'reclaimed'::text) THEN ff_ended_stream.reason
             ELSE COALESCE((ff_ended_stream.s).closed_reason, ff_ended_stream.reason)
         END AS "coalesce",
     c.expires_at,
     LEAST((ff_ended_stream.s).sweep_at, c.expires_at) AS "least"
    FROM ( SELECT COALESCE((ff_ended_stream.s).closed_at, e.at) AS closed_at,
                 CASE
                     WHEN ((ff_ended_stream.s).closed_at IS NULL) THEN LEAST((ff_ended_stream.s).expires_at, (e.at + (ff_ended_stream.s).retention_ttl_ms))
                     ELSE (ff_ended_stream.s).expires_at
                 END AS expires_at
            FROM ( SELECT
                         CASE
                             WHEN (ff_ended_stream.reason IS NOT NULL) THEN GREATEST(ff_ended_stream.at, (ff_ended_stream.s).last_frame_at)
                             ELSE NULL::bigint
                         END AS at) e) c;
END;

create function ff_event_origin() returns text language sql volatile
as $body$
  select concat_ws('.', (select system_identifier from pg_control_system()),
                   greatest((select min_recovery_end_timeline from pg_control_recovery()), (select timeline_id from pg_control_checkpoint())),
                   'event'::regclass::oid)
$body$;

create function ff_full(integer[], uuid[], bigint) returns TABLE(is_full boolean) language sql stable parallel safe
as $body$
  select exists (
           select from ff_key_use($1, $3) u
            where (u.max_concurrent > 0 and u.used >= u.max_concurrent)
               or (u.max_requests_per_window > 0 and u.tokens >= u.max_requests_per_window))
         or exists (select from ff_spent_dimensions($2)) $body$;

create function ff_full_queues(bigint) returns TABLE(queue_no integer) language sql stable parallel safe
as $body$
  select q.queue_no
    from (select q.queue_no, q.quota_key_nos, q.budget_ids from queue q
           where (q.quota_key_nos <> '{}' or q.budget_ids <> '{}')
             and (select true from ready r where r.queue_no = q.queue_no limit 1)
          offset 0) q
   cross join lateral ff_full(q.quota_key_nos, q.budget_ids, $1) f
   where f.is_full $body$;

create function ff_key_use(integer[], bigint) returns TABLE(quota_key_no integer, quota_policy_id uuid, key text, key_from text, window_seconds bigint, max_requests_per_window bigint, max_concurrent bigint, jitter_ms bigint, used bigint, tokens bigint, window_ats bigint[], window_tokens bigint[]) language sql stable parallel safe
as $body$
  select k.quota_key_no, k.quota_policy_id, k.key, p.key_from, p.window_seconds, p.max_requests_per_window, p.max_concurrent, p.jitter_ms,
         greatest(k.taken - t.returned - g.expired, 0), w.tokens, k.window_ats, k.window_tokens
    from unnest($1) as n(quota_key_no)
   cross join lateral (select k.* from quota_key k where k.quota_key_no = n.quota_key_no limit 1) k
    left join lateral (
         select p.* from quota_policy p where p.partition_key = k.partition_key and p.quota_policy_id = k.quota_policy_id limit 1) p on true
   cross join lateral (
         select coalesce(sum(t.returned), 0)::bigint as returned from slot_return t where t.quota_key_no = k.quota_key_no) t
   cross join lateral (
         select count(*) as expired from quota_admission g where g.quota_key_no = k.quota_key_no and g.has_slot and g.guard_until <= $2) g
   cross join lateral (
         select coalesce(sum(w.tokens), 0)::bigint as tokens from unnest(k.window_ats, k.window_tokens) as w(at, tokens)
          where w.at > $2 - 1000 * coalesce(nullif(p.window_seconds, 0), 60)) w $body$;

create function ff_now() returns bigint language sql volatile parallel safe
RETURN ((date_part('epoch'::text, clock_timestamp()) * (1000)::double precision))::bigint;

create function ff_required(text[]) returns text[] language sql immutable parallel safe
as $body$ select array(select c from unnest($1) with ordinality as u(c, nth) where c not like 'limited claims%' order by nth) $body$;

create function ff_scope(integer, integer) returns uuid language sql immutable parallel safe
RETURN ((lpad(to_hex($1), 16, '0'::text) || lpad(to_hex($2), 16, '0'::text)))::uuid;

create function ff_silent_sessions(bigint) returns SETOF integer language sql volatile
BEGIN ATOMIC
 SELECT pg_stat_activity.pid
    FROM pg_stat_activity
   WHERE ((pg_stat_activity.datname = current_database()) AND (pg_stat_activity.usename = CURRENT_USER) AND (pg_stat_activity.application_name = 'flowfabric'::text) AND (pg_stat_activity.state = 'active'::text) AND (pg_stat_activity.wait_event_type = 'Client'::text) AND (pg_stat_activity.state_change <= (clock_timestamp() - make_interval(secs => ((($1)::numeric / 1000.0))::double precision))));
END;

create function ff_spent_dimensions(uuid[]) returns TABLE(nth bigint, partition_key smallint, budget_id uuid, dimension text, used bigint, hard_limit bigint) language sql stable parallel safe
as $body$
  select b.nth, l.partition_key, l.budget_id, l.dimension, l.used, l.hard_limit
    from unnest($1) with ordinality as b(budget_id, nth)
   cross join lateral (
         select l.partition_key, l.budget_id, l.dimension, u.used, l.hard_limit
           from budget_limit l
          cross join lateral (
                select u.used from budget_usage u
                 where u.partition_key = l.partition_key and u.budget_id = l.budget_id and u.dimension = l.dimension limit 1) u
          where l.budget_id = b.budget_id and l.hard_limit > 0 and u.used >= l.hard_limit
         offset 0) l $body$;

create sequence claim_sequence as bigint start 1 increment 1 minvalue 1 maxvalue 9223372036854775807 cache 1;

create sequence execution_sequence as bigint start 1 increment 1 minvalue 1 maxvalue 9223372036854775807 cache 1;

create table admission_key (
  admission_key_no integer not null generated always as identity,
  quota_key_nos integer[] not null,
  attached_key_nos integer[] not null,
  budget_ids uuid[] not null,
  fair_key text not null,
  digest bytea not null,
  constraint admission_key_pkey PRIMARY KEY (admission_key_no),
  constraint admission_key_digest UNIQUE (digest));

create table attempt (
  partition_key smallint not null,
  execution_id uuid not null,
  attempt_index integer not null,
  attempt_state attempt_lifecycle not null,
  attempt_id uuid,
  attempt_type attempt_type,
  started_at bigint,
  suspended_at bigint,
  resumed_at bigint,
  ended_at bigint,
  lease_id uuid,
  lease_epoch bigint,
  worker_no integer,
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
  error_type text,
  traceback text,
  constraint attempt_pkey PRIMARY KEY (partition_key, execution_id, attempt_index))
  with (autovacuum_vacuum_scale_factor=0.05);

create table budget (
  partition_key smallint not null,
  budget_id uuid not null,
  scope_type text not null,
  scope_id text not null,
  enforcement_mode text not null,
  on_hard_limit text not null,
  on_soft_limit text not null,
  reset_interval_ms bigint not null,
  created_at bigint not null,
  constraint budget_pkey PRIMARY KEY (partition_key, budget_id));

create table budget_account (
  partition_key smallint not null,
  budget_id uuid not null,
  breach_count bigint not null default 0,
  soft_breach_count bigint not null default 0,
  reset_count bigint not null default 0,
  last_reset_at bigint,
  last_breach_at bigint,
  last_breach_dim text,
  next_reset_at bigint,
  constraint budget_account_pkey PRIMARY KEY (partition_key, budget_id))
  with (fillfactor=50);

create table budget_limit (
  partition_key smallint not null,
  budget_id uuid not null,
  dimension text not null,
  hard_limit bigint not null,
  soft_limit bigint not null,
  constraint budget_limit_pkey PRIMARY KEY (partition_key, budget_id, dimension))
  with (fillfactor=50);

create table budget_reservation (
  partition_key smallint not null,
  execution_id uuid not null,
  budget_partition smallint not null,
  budget_id uuid not null,
  reservation_key text not null,
  dimension text not null,
  amount bigint not null,
  lease_epoch bigint not null,
  reserved_at bigint not null,
  constraint budget_reservation_pkey PRIMARY KEY (partition_key, execution_id, budget_id, reservation_key, dimension));

create table budget_spend (
  partition_key smallint not null,
  budget_id uuid not null,
  execution_partition smallint not null,
  execution_id uuid not null,
  dimension text not null,
  spent bigint not null,
  constraint budget_spend_pkey PRIMARY KEY (partition_key, budget_id, execution_id, dimension))
  with (fillfactor=80);

create table budget_usage (
  partition_key smallint not null,
  budget_id uuid not null,
  dimension text not null,
  used bigint not null default 0,
  reserved bigint not null default 0,
  constraint budget_usage_pkey PRIMARY KEY (partition_key, budget_id, dimension),
  constraint budget_usage_is_not_negative CHECK (used >= 0 AND reserved >= 0))
  with (fillfactor=50);

create table cancel_backlog (
  partition_key smallint not null,
  flow_id uuid not null,
  requested_at bigint not null,
  requester text not null,
  reason text not null,
  cancellation_policy text not null,
  grace_until bigint not null,
  status text not null default 'pending'::text,
  constraint cancel_backlog_pkey PRIMARY KEY (partition_key, flow_id));

create table cancel_backlog_member (
  partition_key smallint not null,
  flow_id uuid not null,
  execution_id uuid not null,
  constraint cancel_backlog_member_pkey PRIMARY KEY (partition_key, flow_id, execution_id));

create table capability_set (
  capability_set_no integer not null generated always as identity,
  required text[] not null,
  digest bytea not null,
  constraint capability_set_pkey PRIMARY KEY (capability_set_no),
  constraint capability_set_digest UNIQUE (digest));

create table cascade_entry (
  event_id bigint not null,
  partition_key smallint not null,
  flow_id uuid not null,
  outcome smallint not null,
  queued_at bigint not null,
  execution_ids uuid[] not null,
  after_edge_no integer,
  has_left_edges boolean not null default false,
  constraint cascade_entry_pkey PRIMARY KEY (partition_key, event_id));

create table claim (
  partition_key smallint not null,
  claim_no bigint not null,
  worker_no integer not null,
  expires_at bigint not null,
  renewed_at bigint,
  execution_ids uuid[] storage e not null,
  constraint claim_pkey PRIMARY KEY (partition_key, claim_no))
  with (fillfactor=50);

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
  has_slots boolean not null default false,
  constraint claim_grant_pkey PRIMARY KEY (partition_key, execution_id),
  constraint claim_grant_kind CHECK (kind = ANY (ARRAY['claim'::text, 'reclaim'::text])));

create table configuration (
  only_row boolean not null default true,
  flow_partitions integer not null,
  budget_partitions integer not null,
  quota_partitions integer not null,
  constraint configuration_pkey PRIMARY KEY (only_row),
  constraint configuration_has_one_row CHECK (only_row));

create table edge (
  partition_key smallint not null,
  flow_id uuid not null,
  edge_id uuid not null,
  edge_no integer not null,
  upstream_id uuid not null,
  downstream_id uuid not null,
  state dependency_state not null,
  staged_at bigint not null,
  applied_at bigint,
  last_resolved_at bigint,
  dependency_kind text not null,
  data_passing_ref text,
  constraint edge_pkey PRIMARY KEY (partition_key, flow_id, edge_id),
  constraint edge_applied_has_time CHECK ((state <> 'staged'::dependency_state) = (applied_at IS NOT NULL)))
  with (fillfactor=45);

create table edge_group (
  partition_key smallint not null,
  flow_id uuid not null,
  downstream_id uuid not null,
  policy text not null default 'all_of'::text,
  k integer,
  on_satisfied text,
  staged_count integer not null default 0,
  applied_count integer not null default 0,
  succeeded_count integer not null default 0,
  failed_count integer not null default 0,
  skipped_count integer not null default 0,
  group_state group_state not null default 'pending'::group_state,
  created_at bigint not null,
  satisfied_at bigint,
  last_dependency_update_at bigint,
  last_flow_graph_revision bigint,
  cancel_siblings_pending_flag boolean not null default false,
  cancel_siblings_pending_members uuid[],
  cancel_siblings_reason text,
  constraint edge_group_pkey PRIMARY KEY (partition_key, flow_id, downstream_id),
  constraint edge_group_has_no_more_applied_than_staged CHECK (applied_count <= staged_count),
  constraint edge_group_has_no_more_results_than_edges CHECK ((succeeded_count + failed_count + skipped_count) <= applied_count))
  with (fillfactor=45);

create table event (
  event_id bigint not null generated always as identity,
  xid xid8 not null default pg_current_xact_id(),
  at bigint not null,
  lease_epoch bigint,
  execution_id uuid,
  lease_id uuid,
  execution_ids uuid[] storage e,
  lease_ids uuid[] storage e,
  attempt_id uuid,
  kind event_kind not null,
  namespace_no integer not null,
  attempt_index integer,
  worker_no integer,
  partition_key smallint not null,
  outcome smallint,
  reason text,
  flow_id uuid,
  instance_tag text,
  details jsonb,
  tags jsonb,
  constraint event_is_of_one_or_many CHECK ((execution_id IS NULL) <> (execution_ids IS NULL)),
  constraint event_of_many_is_common CHECK (execution_ids IS NULL OR (kind = ANY (ARRAY['acquired'::event_kind, 'renewed'::event_kind, 'released'::event_kind])))) partition by RANGE (at);

create table execution (
  execution_id uuid not null,
  place bigint not null,
  created_at bigint not null,
  queue_no integer not null,
  namespace_no integer not null,
  lane_no integer not null,
  partition_key smallint not null,
  has_tags boolean not null default false,
  retry_count integer not null default 0,
  reclaim_count integer not null default 0,
  replay_count integer not null default 0,
  attached smallint not null default 0,
  attempt_count integer not null default 0,
  lease_epoch bigint not null default 0,
  claim_no bigint,
  claimed_at bigint,
  lease_expires_at bigint,
  lease_id uuid,
  attempt_id uuid,
  worker_no integer,
  attempt_type attempt_type,
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
  last_transition_at bigint not null,
  result_payload bytea storage e,
  last_mutation_at bigint,
  started_at bigint,
  result_encoding text,
  failure_reason text,
  failure_category text,
  granted_until bigint,
  delay_until bigint,
  deadline_at bigint,
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
  input_payload bytea storage e,
  payload_encoding text,
  policy jsonb,
  slot_keys integer[],
  quota_weight bigint,
  constraint execution_pkey PRIMARY KEY (partition_key, execution_id),
  constraint execution_eligibility_is_of_runnable CHECK ((eligibility_state <> 'not_applicable'::eligibility_state) = (lifecycle_phase = 'runnable'::lifecycle_phase)),
  constraint execution_is_past_submitted CHECK (lifecycle_phase <> 'submitted'::lifecycle_phase),
  constraint execution_outcome_is_of_terminal CHECK ((terminal_outcome <> 'none'::terminal_outcome) = (lifecycle_phase = 'terminal'::lifecycle_phase)),
  constraint execution_owned_is_active CHECK (ownership_state = 'unowned'::ownership_state OR lifecycle_phase = 'active'::lifecycle_phase))
  with (autovacuum_analyze_scale_factor=0.05, autovacuum_vacuum_insert_scale_factor=0.1, autovacuum_vacuum_scale_factor=0.02, fillfactor=30, toast_tuple_target=1024);

create table execution_input (
  partition_key smallint not null,
  execution_id uuid not null,
  input_payload bytea storage e not null,
  constraint execution_input_pkey PRIMARY KEY (partition_key, execution_id));

create table execution_result (
  partition_key smallint not null,
  execution_id uuid not null,
  result_payload bytea storage e not null,
  constraint execution_result_pkey PRIMARY KEY (partition_key, execution_id));

create table execution_tag (
  partition_key smallint not null,
  execution_id uuid not null,
  key text not null,
  value text not null,
  constraint execution_tag_pkey PRIMARY KEY (partition_key, execution_id, key));

create table feed_origin (
  generation integer not null,
  origin text not null,
  restored_event_id bigint not null,
  constraint feed_origin_pkey PRIMARY KEY (generation));

create table feed_trim (
  family text not null,
  restored_event_id bigint not null,
  trims bigint not null default 1,
  event_id bigint not null,
  xids xid8[] not null,
  event_ids bigint[] not null,
  unlisted_xid xid8 not null,
  constraint feed_trim_pkey PRIMARY KEY (family, restored_event_id));

create table flow (
  partition_key smallint not null,
  flow_id uuid not null,
  namespace_no integer not null,
  flow_kind text not null,
  graph_revision bigint not null default 0,
  node_count integer not null default 0,
  edge_count integer not null default 0,
  public_flow_state text not null default 'open'::text,
  derived_state text not null default 'open'::text,
  live_count integer not null default 0,
  failed_count integer not null default 0,
  project_at bigint,
  quiet_count smallint not null default 0,
  ended_at bigint,
  retain_until bigint not null default 0,
  created_at bigint not null,
  last_mutation_at bigint not null,
  cancelled_at bigint,
  cancel_reason text,
  cancellation_policy text,
  constraint flow_pkey PRIMARY KEY (partition_key, flow_id))
  with (fillfactor=50);

create table flow_summary (
  partition_key smallint not null,
  flow_id uuid not null,
  total_members bigint not null,
  sampled_members bigint not null,
  members_completed integer not null,
  members_failed integer not null,
  members_cancelled integer not null,
  members_expired integer not null,
  members_skipped integer not null,
  members_active integer not null,
  members_suspended integer not null,
  members_waiting integer not null,
  members_delayed integer not null,
  members_rate_limited integer not null,
  members_waiting_children integer not null,
  public_flow_state text not null,
  last_summary_update_at bigint not null,
  constraint flow_summary_pkey PRIMARY KEY (partition_key, flow_id))
  with (fillfactor=50);

create table flow_tag (
  partition_key smallint not null,
  flow_id uuid not null,
  key text not null,
  value text not null,
  constraint flow_tag_pkey PRIMARY KEY (partition_key, flow_id, key));

create table idempotency_key (
  partition_key smallint not null,
  operation keyed_operation not null,
  scope uuid not null,
  key text not null,
  expires_at bigint not null,
  subject_partition smallint not null,
  subject_id uuid not null,
  execution_kind text,
  payload_encoding text,
  payload_digest bytea,
  policy_digest bytea,
  attempt_index integer,
  outcome jsonb,
  constraint idempotency_key_pkey PRIMARY KEY (partition_key, operation, scope, key));

create table kind (
  kind_no integer not null generated always as identity,
  execution_kind text not null,
  digest bytea not null,
  constraint kind_pkey PRIMARY KEY (kind_no),
  constraint kind_digest UNIQUE (digest));

create table lane (
  lane_no integer not null generated always as identity,
  lane_id text not null,
  state lane_state not null default 'active'::lane_state,
  registered_at bigint not null,
  registered_by text not null,
  fair_by text,
  fair_weights jsonb,
  ageing_ms bigint,
  constraint lane_pkey PRIMARY KEY (lane_no),
  constraint lane_id UNIQUE (lane_id));

create table limit_attachment (
  scope_type text not null,
  scope_id text not null,
  limit_type text not null,
  limit_id uuid not null,
  attached_at bigint not null,
  quota_key_no integer,
  constraint limit_attachment_pkey PRIMARY KEY (scope_type, scope_id, limit_type, limit_id),
  constraint limit_attachment_scope CHECK (scope_type = ANY (ARRAY['lane'::text, 'namespace'::text, 'kind'::text, 'flow'::text])),
  constraint limit_attachment_type CHECK (limit_type = ANY (ARRAY['budget'::text, 'quota'::text])));

create table listed (
  partition_key smallint not null,
  execution_id uuid not null,
  public_state public_state not null,
  at bigint not null,
  constraint listed_pkey PRIMARY KEY (partition_key, execution_id));

create table namespace (
  namespace_no integer not null generated always as identity,
  namespace text not null,
  constraint namespace_pkey PRIMARY KEY (namespace_no),
  constraint namespace_name UNIQUE (namespace));

create table pending_cancel_group (
  partition_key smallint not null,
  flow_id uuid not null,
  downstream_id uuid not null,
  enqueued_at bigint not null,
  constraint pending_cancel_group_pkey PRIMARY KEY (partition_key, flow_id, downstream_id));

create table queue (
  queue_no integer not null generated always as identity,
  route_no integer not null,
  lane_no integer not null,
  kind_no integer not null,
  namespace_no integer not null,
  admission_key_no integer not null default 0,
  quota_key_nos integer[] not null default '{}'::integer[],
  budget_ids uuid[] not null default '{}'::uuid[],
  fair_key text not null default ''::text,
  constraint queue_pkey PRIMARY KEY (queue_no),
  constraint queue_has_kind FOREIGN KEY (kind_no) REFERENCES kind(kind_no),
  constraint queue_has_lane FOREIGN KEY (lane_no) REFERENCES lane(lane_no),
  constraint queue_has_namespace FOREIGN KEY (namespace_no) REFERENCES namespace(namespace_no),
  constraint queue_has_route FOREIGN KEY (route_no) REFERENCES route(route_no),
  constraint queue_of_lane UNIQUE (lane_no, kind_no, namespace_no, route_no, admission_key_no));

create table quota_admission (
  quota_key_no integer not null,
  partition_key smallint not null,
  execution_id uuid not null,
  admitted_at bigint not null,
  guard_until bigint not null,
  has_slot boolean not null,
  is_released boolean not null default false,
  token_at bigint,
  tokens bigint not null default 1,
  constraint quota_admission_pkey PRIMARY KEY (quota_key_no, execution_id));

create table quota_key (
  quota_key_no integer not null generated always as identity,
  partition_key smallint not null,
  quota_policy_id uuid not null,
  key text not null,
  taken bigint not null default 0,
  window_ats bigint[] not null default '{}'::bigint[],
  window_tokens bigint[] not null default '{}'::bigint[],
  constraint quota_key_pkey PRIMARY KEY (partition_key, quota_key_no),
  constraint quota_key_name UNIQUE (partition_key, quota_policy_id, key))
  with (fillfactor=50);

create table quota_policy (
  partition_key smallint not null,
  quota_policy_id uuid not null,
  window_seconds bigint not null,
  max_requests_per_window bigint not null,
  max_concurrent bigint not null,
  jitter_ms bigint not null,
  key_from text,
  weight_from text,
  created_at bigint not null,
  constraint quota_policy_pkey PRIMARY KEY (partition_key, quota_policy_id));

create table ready (
  place bigint not null,
  route_no integer not null,
  queue_no integer not null,
  partition_key smallint not null,
  execution_id uuid not null,
  granted_until bigint)
  with (autovacuum_vacuum_insert_scale_factor=0.1, autovacuum_vacuum_scale_factor=0.02);

create table retained (
  retain_until bigint not null,
  ended_at bigint not null,
  partition_key smallint not null,
  execution_ids uuid[] storage e not null,
  queue_no integer,
  queue_nos integer[],
  terminal_outcome terminal_outcome);

create table route (
  route_no integer not null generated always as identity,
  lane_no integer not null,
  capability_set_no integer not null,
  constraint route_pkey PRIMARY KEY (route_no),
  constraint route_has_capability_set FOREIGN KEY (capability_set_no) REFERENCES capability_set(capability_set_no),
  constraint route_has_lane FOREIGN KEY (lane_no) REFERENCES lane(lane_no),
  constraint route_of_lane UNIQUE (lane_no, capability_set_no));

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

create table signing_key (
  kid text not null,
  secret bytea not null,
  is_current boolean not null,
  installed_at bigint not null,
  expires_at bigint,
  constraint signing_key_pkey PRIMARY KEY (kid),
  constraint signing_key_current_lasts CHECK (NOT is_current OR expires_at IS NULL));

create table slot_return (
  quota_key_no integer not null,
  shard smallint not null,
  returned bigint not null,
  constraint slot_return_pkey PRIMARY KEY (quota_key_no, shard))
  with (fillfactor=50);

create table stream (
  partition_key smallint not null,
  execution_id uuid not null,
  attempt_index integer not null,
  attempt_id uuid not null,
  created_at bigint not null,
  last_ms bigint not null default 0,
  last_seq integer not null default 0,
  frame_count bigint not null default 0,
  first_frame_no bigint not null default 1,
  oldest_ms bigint not null default 0,
  oldest_seq integer not null default 0,
  total_bytes bigint not null default 0,
  last_frame_at bigint,
  has_durable_frame boolean not null default false,
  ema_rate_hz double precision,
  last_append_ts_ms bigint,
  maxlen_applied_last integer,
  durability_mode text not null,
  retention_maxlen integer not null,
  retention_ttl_ms bigint,
  released_epoch bigint not null default 0,
  numbered_epoch bigint not null default 0,
  numbered_count bigint not null default 0,
  closed_at bigint,
  closed_reason text,
  expires_at bigint,
  sweep_at bigint not null,
  constraint stream_pkey PRIMARY KEY (partition_key, execution_id, attempt_index),
  constraint stream_closed_has_reason CHECK ((closed_at IS NULL) = (closed_reason IS NULL)))
  with (fillfactor=50);

create table stream_frame (
  partition_key smallint not null,
  execution_id uuid not null,
  attempt_index integer not null,
  ms bigint not null,
  seq integer not null,
  frame_no bigint not null,
  at bigint not null,
  mode frame_mode not null,
  frame_type text not null,
  payload bytea storage e not null,
  correlation_id text,
  summary_version integer,
  ttl_ms bigint,
  constraint stream_frame_pkey PRIMARY KEY (partition_key, execution_id, attempt_index, ms, seq));

create table stream_summary (
  partition_key smallint not null,
  execution_id uuid not null,
  attempt_index integer not null,
  document bytea not null,
  version integer not null,
  patch_kind text not null,
  first_applied_ms bigint not null,
  last_updated_ms bigint not null,
  constraint stream_summary_pkey PRIMARY KEY (partition_key, execution_id, attempt_index))
  with (fillfactor=50);

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
  constraint suspension_pkey PRIMARY KEY (partition_key, execution_id, suspension_id),
  constraint suspension_closed_has_reason CHECK ((closed_at IS NULL) = (close_reason IS NULL)));

create table timer (
  partition_key smallint not null,
  execution_id uuid not null,
  kind timer_kind not null,
  due_at bigint not null,
  constraint timer_pkey PRIMARY KEY (partition_key, execution_id, kind));

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
  constraint worker_event_kind CHECK (kind = ANY (ARRAY['registered'::text, 'heartbeat'::text, 'marked_dead'::text, 'ttl_swept'::text])));

create table worker_identity (
  worker_no integer not null generated always as identity,
  worker_id text not null,
  worker_instance_id text not null,
  seen_at bigint not null,
  constraint worker_identity_pkey PRIMARY KEY (worker_no),
  constraint worker_identity_name UNIQUE (worker_id, worker_instance_id));

create table event_default partition of event DEFAULT;

CREATE INDEX budget_account_due ON budget_account USING btree (next_reset_at) WHERE next_reset_at IS NOT NULL;

CREATE INDEX budget_limit_of_budget ON budget_limit USING btree (budget_id);

CREATE INDEX budget_reservation_of_budget ON budget_reservation USING btree (budget_partition, budget_id);

CREATE INDEX budget_spend_of_execution ON budget_spend USING btree (execution_partition, execution_id);

CREATE INDEX cancel_backlog_due ON cancel_backlog USING btree (grace_until);

CREATE INDEX cascade_entry_age ON cascade_entry USING btree (queued_at);

CREATE INDEX claim_due ON claim USING btree (expires_at);

CREATE INDEX claim_grant_due ON claim_grant USING btree (expires_at);

CREATE INDEX claim_grant_slots_due ON claim_grant USING btree (expires_at) WHERE has_slots;

CREATE INDEX edge_in ON edge USING btree (downstream_id);

CREATE INDEX edge_out ON edge USING btree (upstream_id, edge_no);

CREATE INDEX event_feed ON ONLY event USING btree (xid, event_id);

CREATE INDEX event_order ON ONLY event USING btree (event_id);

CREATE INDEX event_rare_order ON ONLY event USING btree (kind, event_id) WHERE kind <> ALL (ARRAY['acquired'::event_kind, 'renewed'::event_kind, 'released'::event_kind, 'ended'::event_kind]);

CREATE INDEX execution_flow ON execution USING btree (flow_id, created_at, execution_id) WHERE flow_id IS NOT NULL;

CREATE INDEX execution_list ON execution USING btree (namespace_no, lane_no, created_at);

CREATE INDEX execution_tag_find ON execution_tag USING btree (key, "left"(value, 128));

CREATE INDEX flow_due ON flow USING btree (project_at) WHERE project_at IS NOT NULL;

CREATE INDEX flow_list ON flow USING btree (namespace_no, public_flow_state, derived_state, created_at);

CREATE INDEX flow_retained ON flow USING btree (retain_until);

CREATE INDEX flow_tag_find ON flow_tag USING btree (key, "left"(value, 128));

CREATE INDEX idempotency_key_due ON idempotency_key USING btree (expires_at);

CREATE INDEX listed_state ON listed USING btree (public_state, at);

CREATE INDEX pending_cancel_group_age ON pending_cancel_group USING btree (enqueued_at);

CREATE INDEX queue_limited ON queue USING btree (queue_no) WHERE quota_key_nos <> '{}'::integer[] OR budget_ids <> '{}'::uuid[];

CREATE INDEX queue_of_budget ON queue USING gin (budget_ids);

CREATE INDEX queue_of_quota_key ON queue USING gin (quota_key_nos);

CREATE INDEX quota_admission_due ON quota_admission USING btree (guard_until);

CREATE INDEX quota_admission_execution ON quota_admission USING btree (execution_id);

CREATE INDEX quota_admission_slot ON quota_admission USING btree (quota_key_no, guard_until) WHERE has_slot;

CREATE INDEX quota_key_number ON quota_key USING btree (quota_key_no);

CREATE INDEX quota_policy_id ON quota_policy USING btree (quota_policy_id);

CREATE UNIQUE INDEX ready_queue ON ready USING btree (queue_no, place);

CREATE INDEX ready_route ON ready USING btree (route_no, place);

CREATE INDEX retained_due ON retained USING btree (retain_until);

CREATE INDEX retained_mixed ON retained USING btree (partition_key) WHERE queue_no IS NULL;

CREATE INDEX signal_of_waitpoint ON signal USING btree (waitpoint_id, sequence);

CREATE UNIQUE INDEX signing_key_current ON signing_key USING btree (is_current) WHERE is_current;

CREATE INDEX stream_due ON stream USING btree (sweep_at);

CREATE INDEX suspension_list ON suspension USING btree (suspended_at) WHERE close_reason IS NULL;

CREATE INDEX timer_due ON timer USING btree (kind, due_at);

CREATE INDEX waitpoint_due ON waitpoint USING btree (expires_at) WHERE activated_at IS NULL AND closed_at IS NULL;

CREATE INDEX waitpoint_of_execution ON waitpoint USING btree (execution_id);

CREATE INDEX worker_due ON worker USING btree (lapses_at);

CREATE INDEX worker_list ON worker USING btree (namespace COLLATE "C", worker_instance_id COLLATE "C");

CREATE INDEX worker_event_age ON worker_event USING btree (at);

CREATE INDEX worker_identity_age ON worker_identity USING btree (seen_at);

create view attempt_all as
 SELECT attempt.partition_key,
    attempt.execution_id,
    attempt.attempt_index,
    attempt.attempt_id,
    attempt.attempt_type,
    attempt.attempt_state,
    attempt.started_at,
    attempt.suspended_at,
    attempt.resumed_at,
    attempt.ended_at,
    attempt.lease_id,
    attempt.lease_epoch,
    attempt.worker_no,
    attempt.failure_reason,
    attempt.failure_category,
    attempt.previous_attempt_index,
    attempt.retry_reason,
    attempt.reclaim_reason,
    attempt.replay_reason,
    attempt.replay_requested_by,
    attempt.suspension_marker,
    attempt.suspension_id,
    attempt.usage,
    attempt.policy,
    attempt.error_type,
    attempt.traceback
   FROM attempt
  WHERE attempt.ended_at IS NOT NULL
UNION ALL
 SELECT e.partition_key,
    e.execution_id,
    e.attempt_count - 1 AS attempt_index,
    COALESCE(e.attempt_id, e.lease_id) AS attempt_id,
    e.attempt_type,
        CASE
            WHEN e.lifecycle_phase = 'active'::lifecycle_phase THEN 'started'::text
            WHEN e.lifecycle_phase <> 'terminal'::lifecycle_phase THEN 'suspended'::text
            WHEN e.terminal_outcome = 'success'::terminal_outcome THEN 'ended_success'::text
            WHEN e.terminal_outcome = ANY (ARRAY['cancelled'::terminal_outcome, 'skipped'::terminal_outcome]) THEN 'ended_cancelled'::text
            ELSE 'ended_failure'::text
        END::attempt_lifecycle AS attempt_state,
    COALESCE(a.started_at, e.claimed_at) AS started_at,
    a.suspended_at,
        CASE
            WHEN e.lease_id IS NOT NULL AND a.suspended_at IS NOT NULL THEN e.claimed_at
            ELSE a.resumed_at
        END AS resumed_at,
        CASE
            WHEN e.lifecycle_phase = 'terminal'::lifecycle_phase THEN e.last_transition_at
            ELSE NULL::bigint
        END AS ended_at,
    COALESCE(e.lease_id, a.lease_id) AS lease_id,
    e.lease_epoch,
        CASE
            WHEN e.lease_id IS NOT NULL THEN e.worker_no
            ELSE a.worker_no
        END AS worker_no,
        CASE
            WHEN e.lifecycle_phase <> 'terminal'::lifecycle_phase THEN NULL::text
            WHEN e.terminal_outcome = 'cancelled'::terminal_outcome THEN 'cancelled: '::text || e.cancellation_reason
            ELSE e.failure_reason
        END AS failure_reason,
        CASE
            WHEN e.lifecycle_phase = 'terminal'::lifecycle_phase THEN e.failure_category
            ELSE NULL::text
        END AS failure_category,
    a.previous_attempt_index,
    a.retry_reason,
    a.reclaim_reason,
    a.replay_reason,
    a.replay_requested_by,
        CASE
            WHEN e.lifecycle_phase = ANY (ARRAY['runnable'::lifecycle_phase, 'suspended'::lifecycle_phase]) THEN a.suspension_marker
            ELSE NULL::text
        END AS suspension_marker,
        CASE
            WHEN e.lifecycle_phase = ANY (ARRAY['runnable'::lifecycle_phase, 'suspended'::lifecycle_phase]) THEN a.suspension_id
            ELSE NULL::uuid
        END AS suspension_id,
    a.usage,
    a.policy,
    a.error_type,
    a.traceback
   FROM execution e
     LEFT JOIN attempt a ON a.partition_key = e.partition_key AND a.execution_id = e.execution_id AND a.attempt_index = (e.attempt_count - 1)
  WHERE COALESCE(e.attempt_id, e.lease_id) IS NOT NULL AND a.ended_at IS NULL;

create view event_each as
 SELECT e.event_id,
    m.nth,
    e.xid,
    e.at,
    e.kind,
    e.partition_key,
    COALESCE(e.execution_id, m.execution_id) AS execution_id,
    e.namespace_no,
    e.attempt_index,
    COALESCE(e.lease_id, m.lease_id) AS lease_id,
    e.lease_epoch,
    COALESCE(e.attempt_id, e.lease_id, m.lease_id) AS attempt_id,
    e.worker_no,
    e.outcome,
    e.reason,
    e.flow_id,
    e.instance_tag,
    e.details,
    e.tags
   FROM event e
     LEFT JOIN LATERAL UNNEST(e.execution_ids, e.lease_ids) WITH ORDINALITY m(execution_id, lease_id, nth) ON true;

create view execution_detail as
 SELECT e.partition_key,
    e.execution_id,
    e.place,
    (9000 - (e.place >> 48))::smallint AS priority,
    e.queue_no,
    e.namespace_no,
    e.lane_no,
    k.execution_kind,
    e.lifecycle_phase,
    e.ownership_state,
    e.eligibility_state,
    e.blocking_reason,
    e.terminal_outcome,
    e.attempt_state,
    e.public_state,
    e.attached,
    e.has_tags,
    e.attempt_count,
    e.retry_count,
    e.reclaim_count,
    e.replay_count,
    e.lease_epoch,
    COALESCE(e.attempt_id, e.lease_id) AS attempt_id,
    e.attempt_type,
    e.created_at,
        CASE
            WHEN e.attempt_count > 0 THEN COALESCE(e.started_at, e.claimed_at)
            ELSE NULL::bigint
        END AS started_at,
        CASE
            WHEN e.lifecycle_phase = 'terminal'::lifecycle_phase THEN e.last_transition_at
            ELSE NULL::bigint
        END AS completed_at,
    e.last_transition_at,
    GREATEST(e.last_transition_at, e.last_mutation_at, o.lease_renewed_at) AS last_mutation_at,
    o.lease_id,
    o.claim_no,
    o.worker_no,
    o.claimed_at,
    o.lease_expires_at,
    o.lease_renewed_at,
    o.lease_ttl_ms,
    e.lease_expired_at,
    e.lease_revoked_at,
    e.lease_revoke_reason,
    e.claimed_at AS last_claimed_at,
    e.granted_until,
    e.delay_until,
    e.deadline_at,
        CASE
            WHEN e.lifecycle_phase = 'active'::lifecycle_phase THEN e.attempt_timeout_at
            ELSE NULL::bigint
        END AS attempt_timeout_at,
    e.suspension_timeout_at,
    e.suspension_id,
    e.remaining_attempt_timeout_ms,
    e.retention_ms,
    COALESCE(e.result_payload,
        CASE
            WHEN e.terminal_outcome = 'success'::terminal_outcome THEN ( SELECT r.result_payload
               FROM execution_result r
              WHERE r.partition_key = e.partition_key AND r.execution_id = e.execution_id)
            ELSE NULL::bytea
        END) AS result_payload,
    e.result_encoding,
    e.failure_reason,
    e.failure_category,
    e.cancellation_reason,
    e.cancelled_by,
    e.blocking_detail,
    e.flow_id,
    e.instance_tag,
    e.last_capability_mismatch_at,
    e.last_hmac_validation_failed_at,
    e.progress_pct,
    e.progress_message,
    e.progress_updated_at,
    e.creator_identity,
    COALESCE(e.input_payload, ( SELECT i.input_payload
           FROM execution_input i
          WHERE i.partition_key = e.partition_key AND i.execution_id = e.execution_id)) AS input_payload,
    e.payload_encoding,
    e.policy
   FROM execution e
     LEFT JOIN queue q ON q.queue_no = e.queue_no
     LEFT JOIN kind k ON k.kind_no = q.kind_no
     LEFT JOIN LATERAL ( SELECT e.lease_id,
            e.claim_no,
            e.worker_no,
            e.claimed_at,
            COALESCE(c.renewed_at, e.lease_renewed_at) AS lease_renewed_at,
            GREATEST(e.lease_expires_at, c.expires_at) AS lease_expires_at,
                CASE
                    WHEN c.renewed_at IS NULL THEN e.lease_expires_at - e.claimed_at
                    ELSE c.expires_at - c.renewed_at
                END AS lease_ttl_ms
           FROM ( VALUES (true)) one_row
             LEFT JOIN claim c ON c.partition_key = e.partition_key AND c.claim_no = e.claim_no
          WHERE e.ownership_state <> 'unowned'::ownership_state) o ON true;
