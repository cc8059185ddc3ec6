-- compatible: yes
-- Flows: graphs of executions, their edges and groups, the queue of the cascade, and what flow cancellations owe.

create type group_state as enum ('pending', 'satisfied', 'impossible');
create type dependency_state as enum ('staged', 'unsatisfied', 'satisfied', 'impossible');

-- Every statement that changes the graph of a flow or resolves its edges locks this row first.
create table flow (
  partition_key       smallint not null,
  flow_id             uuid     not null,
  namespace_no        integer  not null,
  flow_kind           text     not null,
  graph_revision      bigint   not null default 0,
  node_count          integer  not null default 0,
  edge_count          integer  not null default 0,
  -- The authoritative state: open until the flow is cancelled.
  public_flow_state   text     not null default 'open',
  -- The derived state. The cascade keeps completed and failed current; the projection tells open, running and blocked apart.
  derived_state       text     not null default 'open',
  -- The members that have not ended or whose end is still queued for the cascade, and those that ended failed, cancelled or expired.
  live_count          integer  not null default 0,
  failed_count        integer  not null default 0,
  -- When the summary is projected next; null once it has counted a flow without live members.
  project_at          bigint,
  -- How many projections in a row have found the summary unchanged: the more, the later the next one.
  quiet_count         smallint not null default 0,
  -- When the last member ended, the last time that none was live any more: the retention of the members counts from then.
  ended_at            bigint,
  -- When retention looks at the flow next; 0 if it has not yet.
  retain_until        bigint   not null default 0,
  created_at          bigint   not null,
  last_mutation_at    bigint   not null,
  cancelled_at        bigint,
  cancel_reason       text,
  cancellation_policy text,
  constraint flow_pkey primary key (partition_key, flow_id)
) with (fillfactor = 50);
create index flow_list on flow (namespace_no, public_flow_state, derived_state, created_at);
create index flow_due on flow (project_at) where project_at is not null;
create index flow_retained on flow (retain_until);

create table flow_tag (
  partition_key smallint not null,
  flow_id       uuid     not null,
  key           text     not null,
  value         text     not null,
  constraint flow_tag_pkey primary key (partition_key, flow_id, key)
);
create index flow_tag_find on flow_tag (key, left(value, 128));

create table flow_summary (
  partition_key            smallint not null,
  flow_id                  uuid     not null,
  total_members            bigint   not null,
  sampled_members          bigint   not null,
  members_completed        integer  not null,
  members_failed           integer  not null,
  members_cancelled        integer  not null,
  members_expired          integer  not null,
  members_skipped          integer  not null,
  members_active           integer  not null,
  members_suspended        integer  not null,
  members_waiting          integer  not null,
  members_delayed          integer  not null,
  members_rate_limited     integer  not null,
  members_waiting_children integer  not null,
  public_flow_state        text     not null,
  last_summary_update_at   bigint   not null,
  constraint flow_summary_pkey primary key (partition_key, flow_id)
) with (fillfactor = 50);

-- An edge is staged, then applied (unsatisfied), then resolved (satisfied or impossible), each once except for a replay.
create table edge (
  partition_key         smallint         not null,
  flow_id               uuid             not null,
  edge_id               uuid             not null,
  -- Counts the edges of the flow: the edges of one upstream execution are resolved in this order.
  edge_no               integer          not null,
  upstream_id           uuid             not null,
  downstream_id         uuid             not null,
  state                 dependency_state not null,
  staged_at             bigint           not null,
  applied_at            bigint,
  last_resolved_at      bigint,
  dependency_kind       text             not null,
  data_passing_ref      text,
  constraint edge_pkey primary key (partition_key, flow_id, edge_id),
  constraint edge_applied_has_time check ((state <> 'staged') = (applied_at is not null))
) with (fillfactor = 45);
create index edge_out on edge (upstream_id, edge_no);
create index edge_in on edge (downstream_id);

-- The inbound edges of one downstream execution: staged_count of them, of which applied_count are applied.
create table edge_group (
  partition_key                   smallint    not null,
  flow_id                         uuid        not null,
  downstream_id                   uuid        not null,
  policy                          text        not null default 'all_of',
  k                               integer,
  on_satisfied                    text,
  staged_count                    integer     not null default 0,
  applied_count                   integer     not null default 0,
  succeeded_count                 integer     not null default 0,
  failed_count                    integer     not null default 0,
  skipped_count                   integer     not null default 0,
  group_state                     group_state not null default 'pending',
  created_at                      bigint      not null,
  satisfied_at                    bigint,
  last_dependency_update_at       bigint,
  last_flow_graph_revision        bigint,
  cancel_siblings_pending_flag    boolean     not null default false,
  cancel_siblings_pending_members uuid[],
  cancel_siblings_reason          text,
  constraint edge_group_pkey primary key (partition_key, flow_id, downstream_id),
  constraint edge_group_has_no_more_results_than_edges check (succeeded_count + failed_count + skipped_count <= applied_count),
  constraint edge_group_has_no_more_applied_than_staged check (applied_count <= staged_count)
) with (fillfactor = 45);

-- Groups whose siblings are still to be cancelled.
create table pending_cancel_group (
  partition_key smallint not null,
  flow_id       uuid     not null,
  downstream_id uuid     not null,
  enqueued_at   bigint   not null,
  constraint pending_cancel_group_pkey primary key (partition_key, flow_id, downstream_id)
);
create index pending_cancel_group_age on pending_cancel_group (enqueued_at);

-- The ends of members that the cascade has not settled yet: one row per event, inserted in the commit that ended them and deleted
-- when all edges that leave them are resolved.
create table cascade_entry (
  event_id      bigint   not null,
  partition_key smallint not null,
  flow_id       uuid     not null,
  outcome       smallint not null,
  queued_at     bigint   not null,
  execution_ids uuid[]   not null,
  -- How far the edges of the first execution are resolved, and whether some before were left because their child was locked.
  after_edge_no integer,
  has_left_edges boolean not null default false,
  constraint cascade_entry_pkey primary key (partition_key, event_id)
);
create index cascade_entry_age on cascade_entry (queued_at);

-- The members that a cancelled flow still has to cancel.
create table cancel_backlog (
  partition_key       smallint not null,
  flow_id             uuid     not null,
  requested_at        bigint   not null,
  requester           text     not null,
  reason              text     not null,
  cancellation_policy text     not null,
  grace_until         bigint   not null,
  status              text     not null default 'pending',
  constraint cancel_backlog_pkey primary key (partition_key, flow_id)
);
create index cancel_backlog_due on cancel_backlog (grace_until);

create table cancel_backlog_member (
  partition_key smallint not null,
  flow_id       uuid     not null,
  execution_id  uuid     not null,
  constraint cancel_backlog_member_pkey primary key (partition_key, flow_id, execution_id)
);

-- The members of a flow. No index of execution has a column that a claim or an end changes.
create index execution_flow on execution (flow_id, created_at, execution_id) where flow_id is not null;

-- A skipped execution's attempt was cancelled.
create or replace view attempt_all as
  select partition_key, execution_id, attempt_index, attempt_id, attempt_type, attempt_state, started_at, suspended_at,
         resumed_at, ended_at, lease_id, lease_epoch, worker_no, failure_reason, failure_category, previous_attempt_index,
         retry_reason, reclaim_reason, replay_reason, replay_requested_by, suspension_marker, suspension_id, usage, policy,
         error_type, traceback
    from attempt
   where ended_at is not null
  union all
  -- The latest attempt, unless its row in attempt has ended: then the execution waits, or ended waiting, for the next attempt.
  select e.partition_key, e.execution_id, e.attempt_count - 1, coalesce(e.attempt_id, e.lease_id), e.attempt_type,
         case
           when e.lifecycle_phase = 'active' then 'started'
           when e.lifecycle_phase <> 'terminal' then 'suspended'
           when e.terminal_outcome = 'success' then 'ended_success'
           when e.terminal_outcome in ('cancelled', 'skipped') then 'ended_cancelled'
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
         case when e.lifecycle_phase in ('runnable', 'suspended') then a.suspension_id end, a.usage, a.policy, a.error_type,
         a.traceback
    from execution e
    left join attempt a on a.partition_key = e.partition_key and a.execution_id = e.execution_id
                       and a.attempt_index = e.attempt_count - 1
   where coalesce(e.attempt_id, e.lease_id) is not null and a.ended_at is null;
