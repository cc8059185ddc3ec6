-- name: read_numbers
-- The numbers of the named namespaces and lanes there are.
select array(select namespace_no from namespace where namespace = any(:namespaces::text[])) as namespace_nos,
       array(select lane_no from lane where lane_id = any(:lanes::text[])) as lane_nos;

-- name: list_pairs
-- The pairs of a namespace and a lane there are, and when the newest or the oldest execution of each in a span of time was
-- created. Lanes that are not named are found by one index entry for each pair.
with recursive used as (
  select n as namespace_no, -1 as lane_no, n as last_no from unnest(:namespace_nos::int[]) as n where :lane_nos::int[] is null
  union all
  select -1, -1, 2147483647 where :namespace_nos is null and :lane_nos is null
  union all
  select i.namespace_no, i.lane_no, u.last_no
    from used u
   cross join lateral (
         select i.namespace_no, i.lane_no from execution_input i
          where (i.namespace_no, i.lane_no) > (u.namespace_no, u.lane_no) and i.namespace_no <= u.last_no
          order by i.namespace_no, i.lane_no limit 1) i
),
pair as materialized (
  select namespace_no, lane_no from used where lane_no >= 0
  union all
  select n.namespace_no, l.lane_no
    from (select unnest(:namespace_nos) as namespace_no
          union all
          select namespace_no from namespace where :namespace_nos is null) n
   cross join unnest(:lane_nos) as l(lane_no)
)
select p.namespace_no, p.lane_no, case when :is_newest_first::boolean
         then (select max(i.created_at) from execution_input i
                where i.namespace_no = p.namespace_no and i.lane_no = p.lane_no and i.created_at between :created_from and :created_to)
         else (select min(i.created_at) from execution_input i
                where i.namespace_no = p.namespace_no and i.lane_no = p.lane_no and i.created_at between :created_from and :created_to)
         end as edge
  from pair p;

-- name: list_newest
-- The newest matching executions of some namespaces and lanes, and how far back they were looked for.
-- Each pair is read to the same depth; of a pair that may hold more the list ends with the last entry that was read.
with entry as materialized (
  select p.nth, p.namespace_no, p.lane_no, i.created_at, i.partition_key, i.execution_id, i.execution_kind
    from unnest(:namespace_nos::int[], :lane_nos::int[]) with ordinality as p(namespace_no, lane_no, nth)
   cross join lateral (
         select i.created_at, i.partition_key, i.execution_id, i.execution_kind
           from execution_input i
          where i.namespace_no = p.namespace_no and i.lane_no = p.lane_no
            and i.created_at between :created_from and :created_to
          order by i.created_at desc
          fetch first (:depth::bigint) rows with ties) i
),
reached as materialized (
  select max(last) as created_at
    from (select min(created_at) as last from entry group by nth having count(*) >= :depth) cut
)
select reached.created_at as reached, found.*
  from reached
  left join lateral (
       select x.partition_key, x.execution_id, n.namespace, l.lane_id, x.execution_kind, x.public_state, x.priority, x.created_at
         from (select x.*, e.public_state, e.priority,
                      ('{fp:' || x.partition_key || '}:' || x.execution_id) collate "C" as id_text
                 from entry x
                -- The limit keeps the entries in the lead, whatever the planner expects of them.
                cross join lateral (
                      select e.public_state, e.priority, e.flow_id, e.completed_at from execution e
                       where e.partition_key = x.partition_key and e.execution_id = x.execution_id limit 1) e
                where (reached.created_at is null or x.created_at >= reached.created_at)
                  and (:kinds::text[] is null or x.execution_kind = any(:kinds))
                  and (:states::public_state[] is null or e.public_state = any(:states))
                  and (:flow_id::uuid is null or e.flow_id = :flow_id)
                  and (:completed_from::bigint is null or e.completed_at >= :completed_from)
                  and (:completed_to::bigint is null or e.completed_at <= :completed_to)
                  and (:tag_key::text is null or exists (
                       select from execution_tag t
                        where t.partition_key = x.partition_key and t.execution_id = x.execution_id
                          and t.key = :tag_key and t.value = :tag_value::text))) x
         join namespace n on n.namespace_no = x.namespace_no
         join lane l on l.lane_no = x.lane_no
        where :after_at::bigint is null or (x.created_at, x.id_text) < (:after_at, :after_id::text collate "C")
        order by x.created_at desc, x.id_text desc
        limit :wanted) found on true;

-- name: list_oldest
-- The oldest matching executions of some namespaces and lanes, and how far on they were looked for.
-- Each pair is read to the same depth; of a pair that may hold more the list ends with the last entry that was read.
with entry as materialized (
  select p.nth, p.namespace_no, p.lane_no, i.created_at, i.partition_key, i.execution_id, i.execution_kind
    from unnest(:namespace_nos::int[], :lane_nos::int[]) with ordinality as p(namespace_no, lane_no, nth)
   cross join lateral (
         select i.created_at, i.partition_key, i.execution_id, i.execution_kind
           from execution_input i
          where i.namespace_no = p.namespace_no and i.lane_no = p.lane_no
            and i.created_at between :created_from and :created_to
          order by i.created_at
          fetch first (:depth::bigint) rows with ties) i
),
reached as materialized (
  select min(last) as created_at
    from (select max(created_at) as last from entry group by nth having count(*) >= :depth) cut
)
select reached.created_at as reached, found.*
  from reached
  left join lateral (
       select x.partition_key, x.execution_id, n.namespace, l.lane_id, x.execution_kind, x.public_state, x.priority, x.created_at
         from (select x.*, e.public_state, e.priority,
                      ('{fp:' || x.partition_key || '}:' || x.execution_id) collate "C" as id_text
                 from entry x
                -- The limit keeps the entries in the lead, whatever the planner expects of them.
                cross join lateral (
                      select e.public_state, e.priority, e.flow_id, e.completed_at from execution e
                       where e.partition_key = x.partition_key and e.execution_id = x.execution_id limit 1) e
                where (reached.created_at is null or x.created_at <= reached.created_at)
                  and (:kinds::text[] is null or x.execution_kind = any(:kinds))
                  and (:states::public_state[] is null or e.public_state = any(:states))
                  and (:flow_id::uuid is null or e.flow_id = :flow_id)
                  and (:completed_from::bigint is null or e.completed_at >= :completed_from)
                  and (:completed_to::bigint is null or e.completed_at <= :completed_to)
                  and (:tag_key::text is null or exists (
                       select from execution_tag t
                        where t.partition_key = x.partition_key and t.execution_id = x.execution_id
                          and t.key = :tag_key and t.value = :tag_value::text))) x
         join namespace n on n.namespace_no = x.namespace_no
         join lane l on l.lane_no = x.lane_no
        where :after_at::bigint is null or (x.created_at, x.id_text) > (:after_at, :after_id::text collate "C")
        order by x.created_at, x.id_text
        limit :wanted) found on true;

-- name: list_candidates
-- The matching executions by way of the narrow indexes named in :sources, of what waits for one of :blocks and of what
-- ended with one of :outcomes, and whether those are all: no index gave :cap.
-- A source that leads to other states too counts those to its length and passes on only its own, so that none comes twice.
with candidate as materialized (
  (select 'claimable' as source, e.*
     from (select queue_no from queue
            where 'claimable' = any(:sources::text[]) and (:lane_nos::int[] is null or lane_no = any(:lane_nos))) q
    cross join lateral (
          select e.partition_key, e.execution_id, e.namespace_no, e.lane_no, e.created_at,
                 case when e.public_state = 'waiting' then e.public_state end as public_state, e.priority, e.flow_id, e.completed_at
            from execution e
           where e.queue_no = q.queue_no
             and (e.eligibility_state = 'eligible_now' or e.ownership_state in ('lease_expired_reclaimable', 'lease_revoked'))
           order by e.place limit :cap) e
    limit :cap)
  union all
  (select 'resumable', partition_key, execution_id, namespace_no, lane_no, created_at, public_state, priority, flow_id,
          completed_at
     from execution
    where 'resumable' = any(:sources) and eligibility_state = 'eligible_now' and attempt_state = 'attempt_interrupted'
    order by last_transition_at limit :cap)
  union all
  (select 'leased', partition_key, execution_id, namespace_no, lane_no, created_at, public_state, priority, flow_id,
          completed_at
     from execution
    where 'leased' = any(:sources) and due_at is not null and ownership_state = 'leased' order by due_at limit :cap)
  union all
  (select 'lost', partition_key, execution_id, namespace_no, lane_no, created_at, public_state, priority, flow_id,
          completed_at
     from execution
    where 'lost' = any(:sources) and ownership_state in ('lease_expired_reclaimable', 'lease_revoked')
    order by ownership_state, lease_expires_at limit :cap)
  union all
  (select 'blocked', e.*
     from unnest(:blocks::eligibility_state[]) as b(eligibility_state)
    cross join lateral (
          select e.partition_key, e.execution_id, e.namespace_no, e.lane_no, e.created_at, e.public_state, e.priority,
                 e.flow_id, e.completed_at
            from execution e
           where e.eligibility_state = b.eligibility_state and e.eligibility_state not in ('eligible_now', 'not_applicable')
           order by e.last_transition_at limit :cap) e
    limit :cap)
  union all
  (select 'unhappy', e.*
     from unnest(:outcomes::terminal_outcome[]) as o(terminal_outcome)
    cross join lateral (
          select e.partition_key, e.execution_id, e.namespace_no, e.lane_no, e.created_at, e.public_state, e.priority,
                 e.flow_id, e.completed_at
            from execution e
           where e.terminal_outcome = o.terminal_outcome and e.terminal_outcome in ('failed', 'cancelled', 'expired', 'skipped')
             and e.completed_at between coalesce(:completed_from::bigint, 0) and coalesce(:completed_to::bigint, 9223372036854775807)
           order by e.completed_at limit :cap) e
    limit :cap)
  union all
  (select 'ended', partition_key, execution_id, namespace_no, lane_no, created_at,
          case when terminal_outcome = 'success' then public_state end, priority, flow_id, completed_at
     from execution
    where 'ended' = any(:sources) and retain_until is not null order by retain_until limit :cap)
  union all
  (select 'partition', partition_key, execution_id, namespace_no, lane_no, created_at, public_state, priority, flow_id,
          completed_at
     from execution
    where 'partition' = any(:sources) and partition_key = :flow_partition order by partition_key, execution_id limit :cap)
  union all
  (select 'suspended', partition_key, execution_id, null, null, null, null, null, null, null
     from suspension
    where 'suspended' = any(:sources) and close_reason is null order by suspended_at limit :cap)
  union all
  (select 'tagged', partition_key, execution_id, null, null, null, null, null, null, null
     from execution_tag
    where 'tagged' = any(:sources) and key = :tag_key::text and left(value, 128) = left(:tag_value::text, 128) limit :cap)
),
whole as materialized (
  select coalesce(bool_and(entries < :cap), true) as is_whole
    from (select count(*) as entries from candidate group by source) counted
)
select whole.is_whole, found.*
  from whole
  left join lateral (
       select x.partition_key, x.execution_id, n.namespace, l.lane_id, x.execution_kind, x.public_state, x.priority, x.created_at
         from (select c.partition_key, c.execution_id, i.execution_kind, e.created_at, e.namespace_no, e.lane_no,
                      e.public_state, e.priority,
                      ('{fp:' || c.partition_key || '}:' || c.execution_id) collate "C" as id_text
                 from candidate c
                -- A tag and a suspension know nothing of their execution; the other sources are executions.
                cross join lateral (
                      select c.namespace_no, c.lane_no, c.created_at, c.public_state, c.priority, c.flow_id, c.completed_at
                       where c.source not in ('tagged', 'suspended')
                      union all
                      select e.namespace_no, e.lane_no, e.created_at, e.public_state, e.priority, e.flow_id, e.completed_at
                        from execution e
                       where c.source in ('tagged', 'suspended') and e.partition_key = c.partition_key and e.execution_id = c.execution_id) e
                cross join lateral ff_input(e.namespace_no, e.lane_no, e.created_at, c.partition_key, c.execution_id) i
                where whole.is_whole and e.public_state is not null
                  and (:namespace_nos::int[] is null or e.namespace_no = any(:namespace_nos))
                  and (:states::public_state[] is null or e.public_state = any(:states))
                  and (:flow_id::uuid is null or e.flow_id = :flow_id)
                  and (:completed_from is null or e.completed_at >= :completed_from)
                  and (:completed_to is null or e.completed_at <= :completed_to)
                  and (:lane_nos is null or e.lane_no = any(:lane_nos))
                  and e.created_at between :created_from and :created_to
                  and (:kinds::text[] is null or i.execution_kind = any(:kinds))
                  and (:tag_key is null or exists (
                       select from execution_tag t
                        where t.partition_key = c.partition_key and t.execution_id = c.execution_id
                          and t.key = :tag_key and t.value = :tag_value))) x
         join namespace n on n.namespace_no = x.namespace_no
         join lane l on l.lane_no = x.lane_no
        where :after_at::bigint is null
           or case when :is_newest_first::boolean then (x.created_at, x.id_text) < (:after_at, :after_id::text collate "C")
              else (x.created_at, x.id_text) > (:after_at, :after_id collate "C") end
        order by case when :is_newest_first then x.created_at end desc, case when :is_newest_first then x.id_text end desc,
                 x.created_at, x.id_text
        limit :wanted) found on true;
