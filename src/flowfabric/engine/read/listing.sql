-- name: read_numbers
-- The numbers of the given namespaces and lanes, and of the queues of the given kinds.
select array(select namespace_no from namespace where namespace = any(:namespaces::text[])) as namespace_nos,
       array(select lane_no from lane where lane_id = any(:lanes::text[])) as lane_nos,
       array(select q.queue_no from kind k join queue q using (kind_no) where k.execution_kind = any(:kinds::text[])) as queue_nos;

-- name: list_pairs
-- The existing pairs of namespace and lane, and the creation time of the newest or oldest execution of each in a time range.
-- Without a lane filter, a recursive index skip scan finds the pairs with one index entry each.
with recursive used as (
  select n as namespace_no, -1 as lane_no, n as last_no from unnest(:namespace_nos::int[]) as n where :lane_nos::int[] is null
  union all
  select -1, -1, 2147483647 where :namespace_nos is null and :lane_nos is null
  union all
  select e.namespace_no, e.lane_no, u.last_no
    from used u
   cross join lateral (
         select e.namespace_no, e.lane_no from execution e
          where (e.namespace_no, e.lane_no) > (u.namespace_no, u.lane_no) and e.namespace_no <= u.last_no
          order by e.namespace_no, e.lane_no limit 1) e
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
         then (select max(e.created_at) from execution e
                where e.namespace_no = p.namespace_no and e.lane_no = p.lane_no and e.created_at between :created_from and :created_to)
         else (select min(e.created_at) from execution e
                where e.namespace_no = p.namespace_no and e.lane_no = p.lane_no and e.created_at between :created_from and :created_to)
         end as edge
  from pair p;

-- fragment: is_queued
-- Whether an execution e waits for a claim, and no grant reserves it.
e.eligibility_state = 'eligible_now' and e.public_state = 'waiting' and (e.granted_until > (select now from clock)) is not true

-- fragment: full_queue
-- Of the queues of those entries that wait for a claim, those whose limits admit nothing now.
full_queue as materialized (
  select i.queue_no
    from (select distinct x.queue_no from entry x where x.is_queued) i
   cross join clock c
   cross join lateral (
         select q.quota_key_nos, q.budget_ids from queue q
          where q.queue_no = i.queue_no and (q.quota_key_nos <> '{}' or q.budget_ids <> '{}') limit 1) q
   cross join lateral ff_full(q.quota_key_nos, q.budget_ids, c.now) f
   where f.is_full
)

-- fragment: state
-- The state of an entry x: in a queue without room, a claim marks only the first execution.
case when x.is_queued and (x.queue_no in (select f.queue_no from full_queue f)) then 'rate_limited' else x.public_state end

-- fragment: row
-- The columns of an execution that filters and cursors use.
select e.created_at, e.partition_key, e.execution_id, e.namespace_no, e.lane_no, e.queue_no, e.place, e.public_state,
       case when e.lifecycle_phase = 'terminal' then e.last_transition_at end as completed_at,
       -- include: is_queued
       as is_queued
  from execution e

-- fragment: summary
-- The columns of an entry of a list.
select x.partition_key, x.execution_id, n.namespace, l.lane_id, k.execution_kind,
       -- include: state
       as public_state,
       (9000 - (x.place >> 48))::smallint as priority, x.created_at

-- fragment: matching
-- The filters that every statement applies to an execution x.
(:queue_nos::int[] is null or x.queue_no in (select unnest(:queue_nos)))
and (:states::public_state[] is null or
     -- include: state
     = any(:states))
and (:completed_from::bigint is null or x.completed_at >= :completed_from)
and (:completed_to::bigint is null or x.completed_at <= :completed_to)
and (:tag_key::text is null or (
     select true from execution_tag t
      where t.partition_key = x.partition_key and t.execution_id = x.execution_id
        and t.key collate "C" = :tag_key and t.value = :tag_value::text))

-- fragment: names
-- Joined to the rows of the page only.
left join namespace n on n.namespace_no = x.namespace_no
left join lane l on l.lane_no = x.lane_no
left join queue q on q.queue_no = x.queue_no
left join kind k on k.kind_no = q.kind_no

-- name: list_newest
-- The newest matching executions of some pairs of namespace and lane, and the creation time down to which all were read.
-- Each pair is read to the same depth; the list ends at the last row read of any pair that may have more.
with clock as materialized (select ff_now() as now),
entry as materialized (
  select p.nth, e.*
    from unnest(:namespace_nos::int[], :lane_nos::int[]) with ordinality as p(namespace_no, lane_no, nth)
   cross join lateral (
         -- include: row
          where e.namespace_no = p.namespace_no and e.lane_no = p.lane_no
            and e.created_at between :created_from and :created_to
          order by e.created_at desc
          fetch first (:depth::bigint) rows with ties) e
),
-- include: full_queue
,
reached as materialized (
  select max(last) as created_at
    from (select min(created_at) as last from entry group by nth having count(*) >= :depth) cut
)
select reached.created_at as reached, found.*
  from reached
  left join lateral (
       -- include: summary
         from (select x.*
                 from (select x.*, ('{fp:' || x.partition_key || '}:' || x.execution_id) collate "C" as id_text
                         from entry x
                        where (reached.created_at is null or x.created_at >= reached.created_at)
                          and
                          -- include: matching
                      ) x
                where :after_at::bigint is null or (x.created_at, x.id_text) < (:after_at, :after_id::text collate "C")
                order by x.created_at desc, x.id_text desc
                limit :wanted) x
         -- include: names
        order by x.created_at desc, x.id_text desc) found on true;

-- name: list_oldest
-- The oldest matching executions of some pairs of namespace and lane, and the creation time up to which all were read.
-- Each pair is read to the same depth; the list ends at the last row read of any pair that may have more.
with clock as materialized (select ff_now() as now),
entry as materialized (
  select p.nth, e.*
    from unnest(:namespace_nos::int[], :lane_nos::int[]) with ordinality as p(namespace_no, lane_no, nth)
   cross join lateral (
         -- include: row
          where e.namespace_no = p.namespace_no and e.lane_no = p.lane_no
            and e.created_at between :created_from and :created_to
          order by e.created_at
          fetch first (:depth::bigint) rows with ties) e
),
-- include: full_queue
,
reached as materialized (
  select min(last) as created_at
    from (select max(created_at) as last from entry group by nth having count(*) >= :depth) cut
)
select reached.created_at as reached, found.*
  from reached
  left join lateral (
       -- include: summary
         from (select x.*
                 from (select x.*, ('{fp:' || x.partition_key || '}:' || x.execution_id) collate "C" as id_text
                         from entry x
                        where (reached.created_at is null or x.created_at <= reached.created_at)
                          and
                          -- include: matching
                      ) x
                where :after_at::bigint is null or (x.created_at, x.id_text) > (:after_at, :after_id::text collate "C")
                order by x.created_at, x.id_text
                limit :wanted) x
         -- include: names
        order by x.created_at, x.id_text) found on true;

-- name: list_candidates
-- The matching executions among the candidates of :sources and :listed_states, and whether the candidates are complete,
-- that is, whether no source reached :cap.
-- A source may contain executions of other states, and two sources the same execution: the filters on the row decide. The entries of
-- queues without room are a source of their own: they may be many.
with clock as materialized (select ff_now() as now),
full_source as materialized (
  select f.queue_no
    from clock c cross join lateral ff_full_queues(c.now) f
   where :sources::text[] && '{ready,limited}'
),
served as materialized (
  select t.route_no, t.lane_no, ff_required(c.required) <> c.required as is_governed
    from route t join capability_set c using (capability_set_no)
   where 'ready' = any(:sources) and (:lane_nos::int[] is null or t.lane_no = any(:lane_nos))
),
candidate as materialized (
  (select 'ready' as source, r.partition_key, r.execution_id
     from (select route_no from served where not is_governed) t
    cross join lateral (
          select r.partition_key, r.execution_id from ready r
           where r.route_no = t.route_no order by r.place limit :cap) r
    limit :cap)
  union all
  (select 'ready', r.partition_key, r.execution_id
     from (select q.queue_no from served t join queue q on q.lane_no = t.lane_no and q.route_no = t.route_no
            where t.is_governed and (q.queue_no in (select f.queue_no from full_source f)) is not true) q
    cross join lateral (
          select r.partition_key, r.execution_id from ready r where r.queue_no = q.queue_no order by r.place limit :cap) r
    limit :cap)
  union all
  -- A grant reserves these whether their queue has room or not.
  (select 'ready', g.partition_key, g.execution_id
     from claim_grant g
    where exists (select from full_source) and g.expires_at > (select now from clock) order by g.expires_at limit :cap)
  union all
  (select 'limited', r.partition_key, r.execution_id
     from full_source f
    cross join lateral (select q.lane_no from queue q where q.queue_no = f.queue_no limit 1) q
    cross join lateral (
          select r.partition_key, r.execution_id from ready r where r.queue_no = f.queue_no order by r.place limit :cap) r
    where 'limited' = any(:sources) and (:lane_nos is null or q.lane_no = any(:lane_nos))
    limit :cap)
  union all
  (select 'listed', s.partition_key, s.execution_id
     from unnest(:listed_states::public_state[]) as w(public_state)
    cross join lateral (
          select s.partition_key, s.execution_id from listed s
           where s.public_state = w.public_state
             and s.at between coalesce(:completed_from::bigint, 0) and coalesce(:completed_to::bigint, 9223372036854775807)
           order by s.at limit :cap) s
    limit :cap)
  union all
  (select 'delayed', partition_key, execution_id
     from timer
    where 'delayed' = any(:sources) and kind = 'delay' order by due_at limit :cap)
  union all
  -- A claim keeps the ids of executions that are no longer leased under it until it is removed.
  (select 'leased', c.partition_key, i.execution_id
     from (select partition_key, execution_ids from claim
            where 'leased' = any(:sources) order by expires_at desc limit :cap) c
    cross join lateral unnest(c.execution_ids) as i(execution_id)
    limit :cap)
  union all
  (select 'ended', r.partition_key, i.execution_id
     from (select partition_key, execution_ids from retained
            where 'ended' = any(:sources) order by retain_until desc limit :cap) r
    cross join lateral unnest(r.execution_ids) as i(execution_id)
    limit :cap)
  union all
  (select 'suspended', partition_key, execution_id
     from suspension
    where 'suspended' = any(:sources) and close_reason is null order by suspended_at limit :cap)
  union all
  (select 'tagged', partition_key, execution_id
     from execution_tag
    where 'tagged' = any(:sources) and key = :tag_key::text and left(value, 128) = left(:tag_value::text, 128) limit :cap)
),
whole as materialized (
  select coalesce(bool_and(entries < :cap), true) as is_whole
    from (select count(*) as entries from candidate group by source) counted
),
entry as materialized (
  select e.*
    from (select distinct partition_key, execution_id from candidate where (select whole.is_whole from whole)) c
   -- The limit makes the planner start from the candidates, whatever its estimates.
   cross join lateral (
         -- include: row
          where e.partition_key = c.partition_key and e.execution_id = c.execution_id limit 1) e
),
-- include: full_queue
select whole.is_whole, found.*
  from whole
  left join lateral (
       -- include: summary
         from (select x.*
                 from (select x.*, ('{fp:' || x.partition_key || '}:' || x.execution_id) collate "C" as id_text
                         from entry x
                        where (:namespace_nos::int[] is null or x.namespace_no = any(:namespace_nos))
                          and (:lane_nos is null or x.lane_no = any(:lane_nos))
                          and x.created_at between :created_from and :created_to
                          and
                          -- include: matching
                      ) x
                where :after_at::bigint is null
                   or case when :is_newest_first::boolean then (x.created_at, x.id_text) < (:after_at, :after_id::text collate "C")
                      else (x.created_at, x.id_text) > (:after_at, :after_id collate "C") end
                order by case when :is_newest_first then x.created_at end desc, case when :is_newest_first then x.id_text end desc,
                         x.created_at, x.id_text
                limit :wanted) x
         -- include: names
        order by case when :is_newest_first then x.created_at end desc, case when :is_newest_first then x.id_text end desc,
                 x.created_at, x.id_text) found on true;

-- name: list_newest_members
-- The matching ones among the next :depth members of a flow before a position, the newest first, and the last position read; null if
-- there are no more.
with clock as materialized (select ff_now() as now),
entry as materialized (
  -- include: row
   where e.flow_id = :flow_id and e.created_at >= :created_from
     and (e.created_at, e.execution_id) < (:before_at::bigint, :before_id::uuid)
   order by e.created_at desc, e.execution_id desc limit :depth
),
-- include: full_queue
,
reached as materialized (
  select case when count(*) >= :depth then min(created_at) end as at,
         case when count(*) >= :depth then (array_agg(execution_id order by created_at, execution_id))[1] end as id
    from entry
)
select reached.at as reached_at, reached.id as reached_id, found.*
  from reached
  left join lateral (
       -- include: summary
         from (select x.*
                 from entry x
                where (:namespace_nos::int[] is null or x.namespace_no = any(:namespace_nos))
                  and (:lane_nos::int[] is null or x.lane_no = any(:lane_nos))
                  and
                  -- include: matching
                order by x.created_at desc, x.execution_id desc
                limit :wanted) x
         -- include: names
        order by x.created_at desc, x.execution_id desc) found on true;

-- name: list_oldest_members
-- The matching ones among the next :depth members of a flow after a position, the oldest first, and the last position read; null if
-- there are no more.
with clock as materialized (select ff_now() as now),
entry as materialized (
  -- include: row
   where e.flow_id = :flow_id and e.created_at <= :created_to
     and (e.created_at, e.execution_id) > (:after_at::bigint, :after_id::uuid)
   order by e.created_at, e.execution_id limit :depth
),
-- include: full_queue
,
reached as materialized (
  select case when count(*) >= :depth then max(created_at) end as at,
         case when count(*) >= :depth then (array_agg(execution_id order by created_at desc, execution_id desc))[1] end as id
    from entry
)
select reached.at as reached_at, reached.id as reached_id, found.*
  from reached
  left join lateral (
       -- include: summary
         from (select x.*
                 from entry x
                where (:namespace_nos::int[] is null or x.namespace_no = any(:namespace_nos))
                  and (:lane_nos::int[] is null or x.lane_no = any(:lane_nos))
                  and
                  -- include: matching
                order by x.created_at, x.execution_id
                limit :wanted) x
         -- include: names
        order by x.created_at, x.execution_id) found on true;
