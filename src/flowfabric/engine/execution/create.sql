-- fragment: alike
-- Inserts executions of one shape that start at once, with generated ids, so that none can exist already.
-- Arrays are unnested in select lists, which avoids a copy; values that all rows share are subqueries, evaluated once.
with clock as materialized (select ff_now() as now),
lane_state as materialized (
  select not exists (select from lane where lane_no = :lane_no and state in ('draining', 'disabled')) as is_accepted
),
-- Drawn together, so that concurrent batches write to different pages of the indexes on place.
drawn as materialized (
  select array(
         select ((9000 - coalesce(priority, (:priorities)[1]))::bigint << 48) | nextval('execution_sequence')
           from (select unnest(:execution_ids::uuid[]), unnest(:priorities::smallint[]) as priority) i) as places
),
fresh as (
  insert into execution (partition_key, execution_id, place, queue_no, namespace_no, lane_no, has_tags, lifecycle_phase,
                         eligibility_state, blocking_reason, attempt_state, deadline_at, created_at, last_transition_at,
                         instance_tag, retention_ms, creator_identity, input_payload, payload_encoding, policy, quota_weight)
  select :partition_key::smallint, execution_id, place, :queue_no::int, :namespace_no::int, :lane_no::int,
         coalesce(is_tagged, (:are_tagged)[1]), 'runnable', 'eligible_now', 'waiting_for_worker',
         'pending_first_attempt', (select now + :deadline_ms::bigint from clock), (select now from clock), (select now from clock),
         case cardinality(:instance_tags) when 1 then (:instance_tags)[1] else instance_tag end, :retention_ms::bigint,
         :creator_identity, case when octet_length(coalesce(input_payload, (:input_payloads)[1])) <= :inline_payload_bytes
                                 then coalesce(input_payload, (:input_payloads)[1]) end,
         :payload_encoding, (select :policy::text::jsonb), :quota_weight::bigint
    from (select unnest(:execution_ids) as execution_id, unnest(places) as place, unnest(:instance_tags::text[]) as instance_tag,
                 unnest(:input_payloads::bytea[]) as input_payload, unnest(:are_tagged::boolean[]) as is_tagged
            from drawn) i
   where (select is_accepted from lane_state)
),
queued as (
  insert into ready (place, route_no, queue_no, partition_key, execution_id)
  select place, :route_no::int, :queue_no, :partition_key, execution_id
    from (select unnest(:execution_ids) as execution_id, unnest(places) as place from drawn) i
   where (select is_accepted from lane_state)
),
large as (
  insert into execution_input (partition_key, execution_id, input_payload)
  select :partition_key, execution_id, input_payload
    from (select execution_id, coalesce(input_payload, (:input_payloads)[1]) as input_payload
            from (select unnest(:execution_ids) as execution_id, unnest(:input_payloads) as input_payload) i) i
   where :has_large_inputs::boolean and (select is_accepted from lane_state) and octet_length(input_payload) > :inline_payload_bytes
),
timed as (
  insert into timer (partition_key, execution_id, kind, due_at)
  select :partition_key, execution_id, 'deadline', (select now + greatest(:deadline_ms, 0) from clock)
    from (select unnest(:execution_ids) as execution_id) i
   where :deadline_ms is not null and (select is_accepted from lane_state)
),
tagged as (
  insert into execution_tag (partition_key, execution_id, key, value)
  select :partition_key, execution_id, coalesce(key, (:tag_keys)[1]), coalesce(value, (:tag_values)[1])
    from (select unnest(:tag_ids::uuid[]) as execution_id, unnest(:tag_keys::text[]) as key,
                 unnest(:tag_values::text[]) as value) t
   where (select is_accepted from lane_state)

-- fragment: answer
-- The place of the first execution, and the state of the lane if it refuses them.
select places[1] as first_place, case when not is_accepted then (select state from lane where lane_no = :lane_no) end as refused_by
  from drawn cross join lane_state

-- name: insert_alike
-- Creates executions of one shape that start at once and do not have the instance tag.
-- include: alike
)
-- include: answer
;

-- name: insert_alike_of_instances
-- As insert_alike, for executions of which some have the instance tag, and writes their events. A separate statement, because an
-- insert of events costs time even without rows.
-- include: alike
  returning execution_id, key, value
),
-- Selected from the inserted tags, so that the transaction has its id before it draws an event id.
inserted_events as (
  insert into event (at, execution_id, partition_key, kind, namespace_no, instance_tag, tags)
  select (select now from clock), execution_id, :partition_key, 'tag_attached'::event_kind, :namespace_no,
         max(value) filter (where key = :instance_key::text), jsonb_object_agg(key, value)
    from tagged group by execution_id having bool_or(key = :instance_key)
)
-- include: answer
;

-- name: insert_executions
-- Creates the new executions of a batch, in input order. Returns the number created per queue, and a row for each item that
-- already existed, was refused by its lane or starts delayed.
-- Inserts keys before executions, both in sorted order, so that two batches cannot deadlock.
-- Waits at most :lock_timeout for a key or an id that another session is inserting.
with clock as materialized (select ff_now() as now, set_config('lock_timeout', :lock_timeout, true)),
refusing as materialized (select lane_no, state from lane where state in ('draining', 'disabled')),
given as (
  select coalesce(partition_key, (:partition_keys)[1]) as partition_key, execution_id,
         coalesce(queue_no, (:queue_nos)[1]) as queue_no, coalesce(route_no, (:route_nos)[1]) as route_no,
         coalesce(lane_no, (:lane_nos)[1]) as lane_no,
         coalesce(namespace_no, (:namespace_nos)[1]) as namespace_no,
         coalesce(priority, (:priorities)[1]) as priority,
         coalesce(execution_kind, (:execution_kinds)[1]) as execution_kind,
         coalesce(input_payload, (:input_payloads)[1]) as input_payload,
         coalesce(creator_identity, (:creator_identities)[1]) as creator_identity,
         case cardinality(:payload_encodings) when 1 then (:payload_encodings)[1] else payload_encoding end as payload_encoding,
         case cardinality(:policies) when 1 then (:policies)[1] else policy end as policy,
         coalesce(
           case cardinality(:delays_until) when 1 then (:delays_until)[1] else delay_until end,
           (select now from clock) + case cardinality(:delays_ms) when 1 then (:delays_ms)[1] else delay_ms end) as delay_until,
         case cardinality(:deadlines_at) when 1 then (:deadlines_at)[1] else deadline_at end as deadline_at,
         case cardinality(:deadlines_ms) when 1 then (:deadlines_ms)[1] else deadline_ms end as deadline_ms,
         case cardinality(:retentions_ms) when 1 then (:retentions_ms)[1] else retention_ms end as retention_ms,
         case cardinality(:quota_weights) when 1 then (:quota_weights)[1] else quota_weight end as quota_weight,
         case cardinality(:instance_tags) when 1 then (:instance_tags)[1] else instance_tag end as instance_tag,
         case cardinality(:tags) when 1 then (:tags)[1] else tags end as tags,
         case cardinality(:idempotency_keys) when 1 then (:idempotency_keys)[1] else idempotency_key end as idempotency_key,
         case cardinality(:key_partitions) when 1 then (:key_partitions)[1] else key_partition end as key_partition,
         case cardinality(:key_ttls_ms) when 1 then (:key_ttls_ms)[1] else key_ttl_ms end as key_ttl_ms,
         nth
    from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :queue_nos::int[], :route_nos::int[], :lane_nos::int[],
                :namespace_nos::int[], :priorities::smallint[], :execution_kinds::text[], :input_payloads::bytea[],
                :payload_encodings::text[], :creator_identities::text[], :policies::text[], :delays_until::bigint[],
                :delays_ms::bigint[], :deadlines_at::bigint[], :deadlines_ms::bigint[], :retentions_ms::bigint[],
                :quota_weights::bigint[], :instance_tags::text[], :tags::text[], :idempotency_keys::text[],
                :key_partitions::smallint[], :key_ttls_ms::bigint[])
         with ordinality
         as i(partition_key, execution_id, queue_no, route_no, lane_no, namespace_no, priority, execution_kind, input_payload,
              payload_encoding, creator_identity, policy, delay_until, delay_ms, deadline_at, deadline_ms,
              retention_ms, quota_weight, instance_tag, tags, idempotency_key, key_partition, key_ttl_ms, nth)
),
item as materialized (
  select i.*, c.now, not exists (select from refusing r where r.lane_no = i.lane_no) as lane_accepts,
         coalesce(i.delay_until > c.now, false) as is_delayed,
         ((9000 - i.priority)::bigint << 48) | nextval('execution_sequence') as place
    from given i cross join clock c
),
won as (
  insert into idempotency_key as k (partition_key, operation, scope, key, expires_at, subject_partition, subject_id,
                                    execution_kind, payload_encoding, payload_digest, policy_digest)
  select key_partition, 'submit', ff_scope(namespace_no, lane_no), idempotency_key, now + key_ttl_ms, partition_key, execution_id,
         execution_kind, payload_encoding, substring(sha256(input_payload) for 16),
         substring(sha256(convert_to(coalesce(nullif(policy, '{}'), ''), 'UTF8')) for 16)
    from item i
   where idempotency_key is not null and lane_accepts
     and (select true from execution e where e.partition_key = i.partition_key and e.execution_id = i.execution_id) is null
   order by key_partition, ff_scope(namespace_no, lane_no), idempotency_key
  on conflict (partition_key, operation, scope, key)
  do update set expires_at = excluded.expires_at, subject_partition = excluded.subject_partition,
                subject_id = excluded.subject_id, execution_kind = excluded.execution_kind,
                payload_encoding = excluded.payload_encoding, payload_digest = excluded.payload_digest,
                policy_digest = excluded.policy_digest
   where k.expires_at <= (select now from clock)
  returning subject_id as execution_id
),
fresh as (
  insert into execution (partition_key, execution_id, place, queue_no, namespace_no, lane_no, has_tags, lifecycle_phase,
                         eligibility_state, blocking_reason, attempt_state, delay_until, deadline_at, created_at,
                         last_transition_at, instance_tag, retention_ms, blocking_detail, creator_identity, input_payload,
                         payload_encoding, policy, quota_weight)
  select partition_key, execution_id, place, queue_no, namespace_no, lane_no, tags is not null, 'runnable',
         (case when is_delayed then 'not_eligible_until_time' else 'eligible_now' end)::eligibility_state,
         (case when is_delayed then 'waiting_for_delay' else 'waiting_for_worker' end)::blocking_reason,
         'pending_first_attempt', case when is_delayed then delay_until end,
         coalesce(deadline_at, now + deadline_ms), now, now, instance_tag, retention_ms,
         case when is_delayed then 'delayed until ' || delay_until end, creator_identity,
         case when octet_length(input_payload) <= :inline_payload_bytes then input_payload end, payload_encoding, policy::jsonb,
         quota_weight
    from (select i.*, idempotency_key is null or execution_id in (select execution_id from won) as is_free from item i) i
   where lane_accepts and is_free
   order by partition_key, execution_id
  on conflict (partition_key, execution_id) do nothing
  returning partition_key, execution_id
),
-- As an output column, `in` uses a hashed subplan; as a condition it would be a join.
answered as materialized (
  select i.*, (partition_key, execution_id) in (select partition_key, execution_id from fresh) as is_new from item i
),
queued as (
  insert into ready (place, route_no, queue_no, partition_key, execution_id)
  select place, route_no, queue_no, partition_key, execution_id from answered where is_new and not is_delayed
),
large as (
  insert into execution_input (partition_key, execution_id, input_payload)
  select partition_key, execution_id, input_payload from answered
   where :has_large_inputs::boolean and is_new and octet_length(input_payload) > :inline_payload_bytes
),
timed as (
  insert into timer (partition_key, execution_id, kind, due_at)
  select partition_key, execution_id, 'delay'::timer_kind, delay_until from answered where is_new and is_delayed
  union all
  select partition_key, execution_id, 'deadline', greatest(coalesce(deadline_at, now + deadline_ms), now)
    from answered where is_new and (deadline_at is not null or deadline_ms is not null)
),
tagged as (
  insert into execution_tag (partition_key, execution_id, key, value)
  select a.partition_key, a.execution_id, t.key, t.value
    from answered a cross join lateral jsonb_each_text(a.tags::jsonb) t
   where a.is_new and a.tags is not null
),
inserted_events as (
  insert into event (at, execution_id, partition_key, kind, namespace_no, instance_tag, tags)
  select now, execution_id, partition_key, 'tag_attached', namespace_no, instance_tag, tags::jsonb
    from answered where is_new and instance_tag is not null
)
select 0 as nth, lane_no, route_no, queue_no, min(place) as place, count(*) as created, true as is_new, true as lane_accepts,
       null as due_in_ms, null as refused_by
  from answered where is_new and not is_delayed group by lane_no, route_no, queue_no
union all
select nth, lane_no, route_no, queue_no, place, 0, is_new, lane_accepts, delay_until - now,
       case when not lane_accepts then (select r.state from refusing r where r.lane_no = answered.lane_no) end
  from answered where (not is_new or is_delayed) and (select ff_confirm());

-- name: list_duplicates
-- For each id and key: the execution that already has one of them, the key's owner first, and what was submitted under the
-- key.
select i.nth, coalesce(k.subject_partition, e.partition_key) as partition_key,
       coalesce(k.subject_id, e.execution_id) as execution_id, k.execution_kind, k.payload_encoding, k.payload_digest,
       k.policy_digest
  from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :key_partitions::smallint[], :namespaces::text[],
              :lanes::text[], :idempotency_keys::text[])
       with ordinality as i(partition_key, execution_id, key_partition, namespace, lane_id, idempotency_key, nth)
  left join namespace n using (namespace)
  left join lane l using (lane_id)
  left join lateral (
       select k.subject_partition, k.subject_id, k.execution_kind, k.payload_encoding, k.payload_digest, k.policy_digest,
              k.expires_at
         from idempotency_key k
        where k.partition_key = i.key_partition and k.operation = 'submit' and k.scope = ff_scope(n.namespace_no, l.lane_no)
          and k.key = i.idempotency_key limit 1) k on k.expires_at > (select ff_now())
  left join lateral (
       select e.partition_key, e.execution_id from execution e
        where e.partition_key = i.partition_key and e.execution_id = i.execution_id limit 1) e on true
 where (select ff_confirm());
