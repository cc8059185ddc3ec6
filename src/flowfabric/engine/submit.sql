-- name: insert_executions
-- Creates what is new of a batch, in input order, and says of each item what became of it.
-- Keys are taken before rows and both in sorted order, so that two batches never wait for each other in a circle.
with clock as materialized (select ff_now() as now),
item as materialized (
  select i.*, l.lane_no, l.state in ('active', 'paused') as lane_accepts, c.now,
         coalesce(i.delay_until, 0) > c.now as is_delayed,
         ((9000 - i.priority)::bigint << 48) | nextval('execution_sequence') as place
    from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :queue_nos::int[], :namespace_nos::int[],
                :priorities::smallint[], :execution_kinds::text[], :input_payloads::bytea[], :payload_encodings::text[],
                :creator_identities::text[], :policies::text[], :delays_until::bigint[], :deadlines_at::bigint[],
                :deadlines_ms::bigint[], :retentions_ms::bigint[], :instance_tags::text[], :has_tags::boolean[])
         with ordinality
         as i(partition_key, execution_id, queue_no, namespace_no, priority, execution_kind, input_payload,
              payload_encoding, creator_identity, policy, delay_until, deadline_at, deadline_ms, retention_ms,
              instance_tag, has_tags, nth)
    join queue q using (queue_no)
    join lane l using (lane_no)
   cross join clock c
),
keyed as (
  select k.nth, k.idempotency_key, k.ttl_ms, i.partition_key, i.namespace_no, i.execution_id, i.now
    from unnest(:key_nths::bigint[], :idempotency_keys::text[], :key_ttls_ms::bigint[]) as k(nth, idempotency_key, ttl_ms)
    join item i using (nth)
   where i.lane_accepts
     and not exists (select from execution e where e.partition_key = i.partition_key and e.execution_id = i.execution_id)
   order by i.partition_key, i.namespace_no, k.idempotency_key
),
won as (
  insert into idempotency (partition_key, namespace_no, idempotency_key, execution_id, expires_at)
  select partition_key, namespace_no, idempotency_key, execution_id, now + ttl_ms from keyed
  on conflict (partition_key, namespace_no, idempotency_key)
  do update set execution_id = excluded.execution_id, expires_at = excluded.expires_at
   where idempotency.expires_at <= (select now from clock)
  returning execution_id
),
fresh as (
  insert into execution (partition_key, execution_id, place, queue_no, namespace_no, priority, lifecycle_phase,
                         eligibility_state, blocking_reason, attempt_state, delay_until, deadline_at,
                         last_transition_at, last_mutation_at, instance_tag, retention_ms, blocking_detail)
  select partition_key, execution_id, place, queue_no, namespace_no, priority, 'runnable',
         (case when is_delayed then 'not_eligible_until_time' else 'eligible_now' end)::eligibility_state,
         (case when is_delayed then 'waiting_for_delay' else 'waiting_for_worker' end)::blocking_reason,
         'pending_first_attempt', case when is_delayed then delay_until end,
         coalesce(deadline_at, now + deadline_ms), now, now, instance_tag, retention_ms,
         case when is_delayed then 'delayed until ' || delay_until end
    from item i
   where lane_accepts
     and (i.nth <> all(:key_nths) or exists (select from won w where w.execution_id = i.execution_id))
   order by partition_key, execution_id
  on conflict (partition_key, execution_id) do nothing
  returning partition_key, execution_id
),
described as (
  insert into execution_input (partition_key, execution_id, created_at, namespace_no, lane_no, has_tags, execution_kind,
                               creator_identity, input_payload, payload_encoding, policy)
  select partition_key, execution_id, now, namespace_no, lane_no, has_tags, execution_kind,
         creator_identity, input_payload, payload_encoding, policy::jsonb
    from fresh join item using (partition_key, execution_id)
),
tagged as (
  insert into execution_tag (partition_key, execution_id, key, value)
  select i.partition_key, i.execution_id, t.key, t.value
    from unnest(:tag_nths::bigint[], :tag_keys::text[], :tag_values::text[]) as t(nth, key, value)
    join item i using (nth)
    join fresh f using (partition_key, execution_id)
)
select i.nth, f.execution_id is not null as is_new, i.is_delayed, i.lane_accepts, i.place, i.delay_until - i.now as due_in_ms
  from item i left join fresh f using (partition_key, execution_id);

-- name: list_duplicates
-- Of each (partition, id, namespace, key): the execution that makes it a duplicate, the key's owner first.
select i.nth, coalesce(k.execution_id, e.execution_id) as execution_id
  from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :namespace_nos::int[], :idempotency_keys::text[])
       with ordinality as i(partition_key, execution_id, namespace_no, idempotency_key, nth)
  left join lateral (
       select k.execution_id from idempotency k
        where k.partition_key = i.partition_key and k.namespace_no = i.namespace_no
          and k.idempotency_key = i.idempotency_key and k.expires_at > (select ff_now())) k on true
  left join execution e on e.partition_key = i.partition_key and e.execution_id = i.execution_id;
