-- name: lock_targets
-- Locks the target executions of signals and returns their phases. The phase is null if the execution does not exist or is
-- locked by another session. The short lock_timeout bounds the wait for a row that another transaction locked out of order.
with lock_timeout as materialized (select set_config('lock_timeout', '50ms', true))
select e.phase, x."exists"
  from lock_timeout
 cross join unnest(:partition_keys::smallint[], :execution_ids::uuid[]) with ordinality as i(partition_key, execution_id, nth)
  left join lateral (
       select e.lifecycle_phase::text as phase from execution e
        where e.partition_key = i.partition_key and e.execution_id = i.execution_id
          for update skip locked) e on true
  left join lateral (
       select true as "exists" from execution x
        where e.phase is null and x.partition_key = i.partition_key and x.execution_id = i.execution_id limit 1) x on true
 order by i.nth;

-- name: read_deliveries
-- One row for each signal of locked executions: its waitpoint and the signal it duplicates, if any. The first signal of each
-- execution also has the signal count and limit of the execution and its open suspension; the very first one the signing
-- keys. Suspensions and waitpoints cannot change while their execution is locked. A column whose values are all equal may
-- be passed as one element.
with clock as materialized (select ff_now() as now),
item as materialized (
  select coalesce(partition_key, (:partition_keys)[1]) as partition_key, coalesce(execution_id, (:execution_ids)[1]) as execution_id,
         coalesce(waitpoint_id, (:waitpoint_ids)[1]) as waitpoint_id,
         case cardinality(:signal_ids) when 1 then (:signal_ids)[1] else signal_id end as signal_id,
         case cardinality(:idempotency_keys) when 1 then (:idempotency_keys)[1] else idempotency_key end as idempotency_key,
         coalesce(is_first, (:are_first)[1]) as is_first, nth
    from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :waitpoint_ids::uuid[], :signal_ids::uuid[],
                :idempotency_keys::text[], :are_first::boolean[])
         with ordinality as i(partition_key, execution_id, waitpoint_id, signal_id, idempotency_key, is_first, nth)
)
select c.now, w.*, coalesce(case when k.expires_at > c.now then k.subject_id end, g.signal_id) as earlier_id, x.*, r.*
  from clock c
 cross join item i
  left join lateral (
       select w.waitpoint_key, w.token, w.state::text, w.suspension_id as waitpoint_suspension_id, w.activated_at,
              w.expires_at, w.signal_count
         from waitpoint w
        where w.partition_key = i.partition_key and w.waitpoint_id = i.waitpoint_id and w.execution_id = i.execution_id
        limit 1) w on true
  left join lateral (
       select k.subject_id, k.expires_at from idempotency_key k
        where k.partition_key = i.partition_key and k.operation = 'signal' and k.scope = i.waitpoint_id
          and k.key = i.idempotency_key limit 1) k on true
  left join lateral (
       select g.signal_id from signal g
        where g.partition_key = i.partition_key and g.execution_id = i.execution_id and g.signal_id = i.signal_id limit 1) g on true
  left join lateral (
       select e.policy ->> 'max_signals_per_execution' as signal_limit,
              (select coalesce(sum(o.signal_count), 0)::bigint from waitpoint o
                where o.partition_key = e.partition_key and o.execution_id = e.execution_id) as signals_accepted,
              s.suspension_id, s.waitpoint_ids, s.condition, s.resume_policy, s.satisfied_before
         from execution e
         left join lateral (
              select s.suspension_id, s.waitpoint_ids, s.condition::text, s.resume_policy::text,
                     cardinality(s.satisfier_ids) as satisfied_before, s.closed_at
                from suspension s
               where s.partition_key = e.partition_key and s.execution_id = e.execution_id and s.suspension_id = e.suspension_id
               limit 1) s on s.closed_at is null
        where i.is_first and e.partition_key = i.partition_key and e.execution_id = i.execution_id
        limit 1) x on true
  left join lateral (
       select array_agg(r.kid) as kids, array_agg(r.secret) as secrets, array_agg(r.is_current) as are_current,
              array_agg(r.installed_at) as installed_ats, array_agg(r.expires_at) as key_expiries
         from signing_key r) r on i.nth = 1
 order by i.nth;

-- name: list_satisfiers
-- The signals that the conditions of suspensions have counted so far, in any order: the order does not matter to a condition.
select i.nth, g.signal_id, g.signal_name, g.waitpoint_key, g.source_type, g.source_identity
  from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :suspension_ids::uuid[])
       with ordinality as i(partition_key, execution_id, suspension_id, nth)
 cross join lateral (
       select s.satisfier_ids from suspension s
        where s.partition_key = i.partition_key and s.execution_id = i.execution_id and s.suspension_id = i.suspension_id
        limit 1) s
 cross join lateral unnest(s.satisfier_ids) as c(signal_id)
 cross join lateral (
       select g.* from signal g
        where g.partition_key = i.partition_key and g.execution_id = i.execution_id and g.signal_id = c.signal_id limit 1) g;

-- name: insert_deliveries
-- Inserts accepted signals in order, updates the signal counts of their waitpoints and the satisfiers of their suspensions,
-- stores their idempotency keys, and writes an event for each accepted signal and each duplicate. Only the executions are locked,
-- so other rows are updated by key, not by ctid: another writer may commit a newer version of them.
-- `= any(array[partition])` keeps the planner from scanning a whole index and joining the parameters to it. A column whose
-- values are all equal may be passed as one element.
with recorded as (
  insert into signal (partition_key, execution_id, signal_id, suspension_id, waitpoint_id, waitpoint_key, signal_name,
                      signal_category, source_type, source_identity, correlation_id, idempotency_key, target_scope,
                      created_at, accepted_at, effect, disposition, payload, payload_encoding)
  select coalesce(i.partition_key, (:partition_keys)[1]), coalesce(i.execution_id, (:execution_ids)[1]), coalesce(i.signal_id, (:signal_ids)[1]),
         case cardinality(:suspension_ids) when 1 then (:suspension_ids)[1] else i.suspension_id end,
         coalesce(i.waitpoint_id, (:waitpoint_ids)[1]), coalesce(i.waitpoint_key, (:waitpoint_keys)[1]), coalesce(i.signal_name, (:signal_names)[1]),
         coalesce(i.signal_category, (:signal_categories)[1]), coalesce(i.source_type, (:source_types)[1]),
         coalesce(i.source_identity, (:source_identities)[1]),
         case cardinality(:correlation_ids) when 1 then (:correlation_ids)[1] else i.correlation_id end,
         case cardinality(:idempotency_keys) when 1 then (:idempotency_keys)[1] else i.idempotency_key end,
         coalesce(i.target_scope, (:target_scopes)[1]),
         coalesce(case cardinality(:created_ats) when 1 then (:created_ats)[1] else i.created_at end, :now), :now,
         coalesce(i.effect, (:effects)[1]), coalesce(i.disposition, (:dispositions)[1]),
         case cardinality(:payloads) when 1 then (:payloads)[1] else i.payload end,
         case cardinality(:payload_encodings) when 1 then (:payload_encodings)[1] else i.payload_encoding end
    from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :signal_ids::uuid[], :suspension_ids::uuid[],
                :waitpoint_ids::uuid[], :waitpoint_keys::text[], :signal_names::text[], :signal_categories::text[],
                :source_types::text[], :source_identities::text[], :correlation_ids::text[], :idempotency_keys::text[],
                :target_scopes::text[], :created_ats::bigint[], :effects::text[], :dispositions::text[],
                :payloads::bytea[], :payload_encodings::text[])
         with ordinality
         as i(partition_key, execution_id, signal_id, suspension_id, waitpoint_id, waitpoint_key, signal_name,
              signal_category, source_type, source_identity, correlation_id, idempotency_key, target_scope, created_at,
              effect, disposition, payload, payload_encoding, nth)
   order by i.nth
),
counted as (
  update waitpoint w
     set signal_count = w.signal_count + i.accepted, matched_signal_count = w.matched_signal_count + i.matched, last_signal_at = :now
    from unnest(:counted_partitions::smallint[], :counted_waitpoints::uuid[], :accepted::int[], :matched::int[])
         as i(partition_key, waitpoint_id, accepted, matched)
   where w.partition_key = any(array[i.partition_key]) and w.waitpoint_id = i.waitpoint_id
),
waiting as (
  update suspension s
     set satisfier_ids = s.satisfier_ids || i.satisfiers::uuid[], last_signal_at = :now
    from unnest(:waiting_partitions::smallint[], :waiting_executions::uuid[], :waiting_suspensions::uuid[], :satisfiers::text[])
         as i(partition_key, execution_id, suspension_id, satisfiers)
   where s.partition_key = any(array[i.partition_key]) and s.execution_id = i.execution_id and s.suspension_id = i.suspension_id
),
inserted_events as (
  insert into event (at, execution_id, partition_key, kind, namespace_no, attempt_index, flow_id, instance_tag, details, tags)
  select :now, i.execution_id, i.partition_key, 'signal', e.namespace_no, nullif(e.attempt_count, 0) - 1, e.flow_id, e.instance_tag,
         i.details::jsonb,
         case when e.has_tags then (
           select jsonb_object_agg(t.key, t.value) from execution_tag t
            where t.partition_key = i.partition_key and t.execution_id = i.execution_id) end
    from unnest(:event_partitions::smallint[], :event_executions::uuid[], :event_details::text[])
         with ordinality as i(partition_key, execution_id, details, nth)
   cross join lateral (
         select e.namespace_no, e.attempt_count, e.flow_id, e.instance_tag, e.has_tags from execution e
          where e.partition_key = i.partition_key and e.execution_id = i.execution_id
         offset 0) e
   order by i.nth
)
insert into idempotency_key (partition_key, operation, scope, key, expires_at, subject_partition, subject_id)
select i.partition_key, 'signal', i.waitpoint_id, i.key, i.expires_at, i.partition_key, i.signal_id
  from unnest(:key_partitions::smallint[], :key_waitpoints::uuid[], :keys::text[], :key_signals::uuid[], :key_expiries::bigint[])
       as i(partition_key, waitpoint_id, key, signal_id, expires_at)
on conflict (partition_key, operation, scope, key) do update
   set subject_id = excluded.subject_id, expires_at = excluded.expires_at;

-- name: take_overflow
-- Deletes the signals of a waitpoint beyond the newest :maxlen, except those that its condition has counted. The disposition
-- shows which were counted; for signals buffered before the suspend, the satisfiers of the suspension show it.
delete from signal
 where ctid = any(array(
       select g.tid
         from unnest(:partition_keys::smallint[], :waitpoint_ids::uuid[], :execution_ids::uuid[], :suspension_ids::uuid[],
                     :maxlens::int[])
              as i(partition_key, waitpoint_id, execution_id, suspension_id, maxlen)
        cross join lateral (
              select g.ctid as tid, g.signal_id, g.disposition from signal g
               where g.partition_key = i.partition_key and g.waitpoint_id = i.waitpoint_id
               order by g.sequence desc offset i.maxlen) g
        where g.disposition not in ('appended_to_waitpoint', 'resume_condition_satisfied')
          and (g.disposition <> 'buffered_for_pending_waitpoint' or not exists (
               select from suspension s
                where s.partition_key = i.partition_key and s.execution_id = i.execution_id
                  and s.suspension_id = i.suspension_id and g.signal_id = any(s.satisfier_ids)))));

-- name: read_for_approval
-- The lane of an execution, and the token of its waitpoint; the token is null if there is no such waitpoint.
select l.lane_id, w.token
  from execution e
  join lane l using (lane_no)
  left join lateral (
       select w.token from waitpoint w
        where w.partition_key = e.partition_key and w.waitpoint_id = :waitpoint_id and w.execution_id = e.execution_id limit 1) w on true
 where e.partition_key = :partition_key and e.execution_id = :execution_id;

-- name: read_signal_target
-- Where a signal for the wait of this name would go: the state of the execution, and the waitpoint that already has the signal or,
-- if none has it, the open waitpoint. If there is none, open_keys has the names of other open waits, at most ten.
select e.public_state, coalesce(g.waitpoint_id, w.waitpoint_id) as waitpoint_id, o.open_keys
  from execution e
  left join lateral (
       select g.waitpoint_id from signal g
        where g.partition_key = e.partition_key and g.execution_id = e.execution_id and g.signal_id = :signal_id::uuid limit 1) g on true
  left join lateral (
       select w.waitpoint_id from (
              select w.waitpoint_id from waitpoint w
               where e.lifecycle_phase <> 'terminal' and w.partition_key = e.partition_key and w.execution_id = e.execution_id
                 and w.state in ('pending', 'active') and w.waitpoint_key = :waitpoint_key offset 0) w
        order by w.waitpoint_id limit 1) w on true
  left join lateral (
       select array_agg(distinct k.waitpoint_key) as open_keys
         from (select k.waitpoint_key from waitpoint k
                where e.lifecycle_phase <> 'terminal' and k.partition_key = e.partition_key and k.execution_id = e.execution_id
                  and k.state in ('pending', 'active') limit 10) k) o on w.waitpoint_id is null
 where e.partition_key = :partition_key and e.execution_id = :execution_id;

-- name: list_observed
-- The signals of a suspension, open or closed, in the order of acceptance; a row of nulls if there are none, no row if the
-- execution does not exist. Without an id, the latest suspension of the execution is used, if it belongs to the attempt. The
-- last satisfier of a suspension that timed out is the timeout signal, which has no waitpoint.
select g.signal_id, g.signal_name, g.signal_category, g.source_type, g.source_identity, g.correlation_id, g.accepted_at,
       g.payload, g.disposition, coalesce(g.signal_id = any(s.satisfier_ids), false) as satisfier, s.closed_at is not null as is_closed
  from execution e
  left join lateral (
       select s.* from suspension s
        where s.partition_key = e.partition_key and s.execution_id = e.execution_id
          and s.suspension_id = coalesce(:suspension_id::uuid, e.suspension_id)
          and (:suspension_id is not null or s.attempt_index = :attempt_index)
        limit 1) s on true
  left join lateral (
       select g.* from unnest(s.waitpoint_ids) as i(waitpoint_id)
        cross join lateral (
              select g.* from signal g
               where g.partition_key = s.partition_key and g.waitpoint_id = i.waitpoint_id
                 and g.suspension_id = s.suspension_id offset 0) g
       union all
       select g.* from (
              select g.* from signal g
               where g.partition_key = s.partition_key and g.execution_id = s.execution_id
                 and g.signal_id = s.satisfier_ids[cardinality(s.satisfier_ids)] limit 1) g
        where g.waitpoint_id is null) g on true
 where e.partition_key = :partition_key and e.execution_id = :execution_id
 order by g.sequence;
