-- compatible: yes
-- Streams of attempts, and what the event feeds need: positions by event id, tags on events, and how far events were trimmed.

create type frame_mode as enum ('durable', 'summary', 'best_effort');

-- The stream of one attempt; its first frame creates it. The bit 4 of execution.attached: ending the attempt must update its
-- stream (open, or closed as lease_expired).
create table stream (
  partition_key       smallint not null,
  execution_id        uuid     not null,
  attempt_index       integer  not null,
  attempt_id          uuid     not null,
  created_at          bigint   not null,
  -- The id of the newest frame.
  last_ms             bigint   not null default 0,
  last_seq            integer  not null default 0,
  -- Frames are numbered from 1. Frames below first_frame_no are hidden, and deleted later.
  frame_count         bigint   not null default 0,
  first_frame_no      bigint   not null default 1,
  -- No stored frame has a lower id: scans begin here, so that they do not step over the index entries of deleted frames.
  oldest_ms           bigint   not null default 0,
  oldest_seq          integer  not null default 0,
  total_bytes         bigint   not null default 0,
  last_frame_at       bigint,
  has_durable_frame   boolean  not null default false,
  -- The size of the window of best-effort frames; last_append_ts_ms is the time of the last best-effort frame.
  ema_rate_hz         float8,
  last_append_ts_ms   bigint,
  maxlen_applied_last integer,
  -- The stream policy of the execution.
  durability_mode     text     not null,
  retention_maxlen    integer  not null,
  retention_ttl_ms    bigint,
  -- Leases up to this epoch have ended: a frame that comes under one of them is refused.
  released_epoch      bigint   not null default 0,
  -- The frames that the holder of this lease has numbered: those up to this number are stored, and a repeat is not stored again.
  numbered_epoch      bigint   not null default 0,
  numbered_count      bigint   not null default 0,
  closed_at           bigint,
  closed_reason       text,
  -- When all frames are hidden.
  expires_at          bigint,
  -- When the stream is swept for frames and rows to delete. It is not raised with every append, because it is indexed.
  sweep_at            bigint   not null,
  constraint stream_pkey primary key (partition_key, execution_id, attempt_index),
  constraint stream_closed_has_reason check ((closed_at is null) = (closed_reason is null))
) with (fillfactor = 50);
create index stream_due on stream (sweep_at);

-- How a stream changes when the lease of an epoch ends: with a reason, it is closed at that time unless it is closed already; a
-- reclaim replaces the reason of a lost lease. An append that held the lock may have stored a frame after the time of the end.
create function ff_ended_stream(s stream, epoch bigint, reason text, at bigint)
  returns table (released_epoch bigint, closed_at bigint, closed_reason text, expires_at bigint, sweep_at bigint)
  language sql stable parallel safe
  begin atomic
    select epoch, c.closed_at, case when reason = 'reclaimed' then reason else coalesce(s.closed_reason, reason) end,
           c.expires_at, least(s.sweep_at, c.expires_at)
      from (select coalesce(s.closed_at, e.at) as closed_at,
                   case when s.closed_at is null then least(s.expires_at, e.at + s.retention_ttl_ms) else s.expires_at end as expires_at
              from (select case when reason is not null then greatest(ff_ended_stream.at, s.last_frame_at) end as at) e) c;
  end;

create table stream_frame (
  partition_key   smallint   not null,
  execution_id    uuid       not null,
  attempt_index   integer    not null,
  ms              bigint     not null,
  seq             integer    not null,
  frame_no        bigint     not null,
  at              bigint     not null,
  mode            frame_mode not null,
  frame_type      text       not null,
  payload         bytea      not null,
  correlation_id  text,
  summary_version integer,
  ttl_ms          bigint,
  constraint stream_frame_pkey primary key (partition_key, execution_id, attempt_index, ms, seq)
);
alter table stream_frame alter column payload set storage external;

-- The document that the summary frames of a stream were merged into, as JSON text in UTF-8.
create table stream_summary (
  partition_key    smallint not null,
  execution_id     uuid     not null,
  attempt_index    integer  not null,
  document         bytea    not null,
  version          integer  not null,
  patch_kind       text     not null,
  first_applied_ms bigint   not null,
  last_updated_ms  bigint   not null,
  constraint stream_summary_pkey primary key (partition_key, execution_id, attempt_index)
) with (fillfactor = 50);

alter type event_kind add value 'signal';
alter type event_kind add value 'operator_action';
alter type event_kind add value 'tag_attached';
alter type event_kind add value 'tag_cleared';

-- The tags of the execution when the event was written, for the filters of feeds; null if it had none.
alter table event add column tags jsonb;

-- Feeds read events in the order of their ids. Events of an uncommitted transaction may get lower ids than visible ones: they are
-- found by event_feed. Events of rare kinds are found without reading the events of the other kinds.
drop index event_rare_feed;
drop index event_rare_execution;
create index event_order on event (event_id);
create index event_rare_order on event (kind, event_id)
  where kind not in ('acquired', 'renewed', 'released', 'ended');

create or replace view event_each as
  select e.event_id, m.nth, e.xid, e.at, e.kind, e.partition_key, coalesce(e.execution_id, m.execution_id) as execution_id,
         e.namespace_no, e.attempt_index, coalesce(e.lease_id, m.lease_id) as lease_id, e.lease_epoch,
         coalesce(e.attempt_id, e.lease_id, m.lease_id) as attempt_id, e.worker_no, e.outcome, e.reason, e.flow_id, e.instance_tag,
         e.details, e.tags
    from event e
    left join lateral unnest(e.execution_ids, e.lease_ids) with ordinality as m(execution_id, lease_id, nth) on true;

-- What was deleted of each family of events, for each origin of their transaction ids, which restored_event_id names as in
-- feed_origin. A cursor that may need deleted events is refused.
create table feed_trim (
  family            text     not null,
  restored_event_id bigint   not null,
  trims             bigint   not null default 1,
  -- The newest deleted event.
  event_id          bigint   not null,
  -- The transactions that wrote deleted events, each with its newest deleted event. Only those with ids up to unlisted_xid may be
  -- missing.
  xids              xid8[]   not null,
  event_ids         bigint[] not null,
  unlisted_xid      xid8     not null,
  constraint feed_trim_pkey primary key (family, restored_event_id)
);

-- The server that the transaction ids of new events come from. A restore of a dump creates the table anew, on the same server
-- too. A standby that was promoted, and a server that was recovered to a point in time, may lack transactions and use their ids
-- again: they have a new timeline. Until the first checkpoint of a timeline only the end of the recovery names it. A checkpoint
-- clears that, so it is read first.
create function ff_event_origin() returns text language sql volatile as $$
  select concat_ws('.', (select system_identifier from pg_control_system()),
                   greatest((select min_recovery_end_timeline from pg_control_recovery()), (select timeline_id from pg_control_checkpoint())),
                   'event'::regclass::oid)
$$;

-- The servers that the transaction ids of the events come from, the current one last. After a restore on another server the
-- transaction ids of the events up to restored_event_id mean nothing; those events are in the past.
create table feed_origin (
  generation        integer not null,
  origin            text    not null,
  restored_event_id bigint  not null,
  constraint feed_origin_pkey primary key (generation)
);
