-- name: list_reserved
-- The routes of these lanes that only claims with admission serve, the capabilities that they require for it, and whether their queues
-- are served in turns.
select r.route_no, c.required, l.fair_by is not null or l.ageing_ms is not null as takes_turns
  from lane l join route r using (lane_no) join capability_set c using (capability_set_no)
 where l.lane_id = any(:lanes::text[])
   and exists (select from unnest(c.required) as x(capability) where starts_with(x.capability, :limited));

-- name: read_has_entries
-- Whether one of these routes has an entry.
select exists (
       select from unnest(:route_nos::int[]) as i(route_no)
        cross join lateral (select from ready r where r.route_no = i.route_no order by r.place limit 1) r) as has_entries;

-- name: pick_candidates
-- Locks the best executions that may be within their limits: of the routes that the capabilities match, of which it reads at most :reach
-- entries in their order, and of the given spans of queues. Of a queue with limits it locks as many as it has room for, or its first
-- one if it has none, so that its head is marked as blocked, and those that were admitted before and need less room.
-- The room is an estimate from rows that are not locked: admission decides. The rates of :closed_keys have no room; of :passed_queues
-- it locks only executions that need less room.
-- Returns the candidates; for each route and priority the first entry that is none ('kept'); for each span the first entry that is none
-- and how many it has read ('span'); the queues without room ('full'), with the time after which one that has reached a rate may have
-- room in the column weight; the queues with more entries than room ('short'); executions that would be candidates but are locked or have just changed ('missed'); and as the last row
-- ('read') the number of entries read, whether the scan of the routes was cut short, and where, and after a full scan its time on the
-- server in microseconds.
with clock as materialized (select ff_now() as now),
-- include: claim.routes
,
-- include: claim.scan
,
spanned as not materialized (
  select s.span_no, r.*
    from unnest(:queue_nos::int[], :first_places::bigint[], :last_places::bigint[], :shares::int[])
         with ordinality as s(queue_no, first_place, last_place, share, span_no)
   cross join lateral (select q.lane_no from queue q where q.queue_no = s.queue_no limit 1) q
    join lane l on l.lane_no = q.lane_no and l.state in ('active', 'draining')
   cross join lateral (
         select * from entry r
          where r.queue_no = s.queue_no and r.place between s.first_place and s.last_place
            and (r.granted_until is null or r.granted_until <= (select now from clock)) and r.execution_id <> all(:skipped::uuid[])
          order by r.place limit s.share) r
),
scanned as materialized (
  select r.* from scan r where not :is_filtered::boolean or r.queue_no in (select queue_no from wanted) limit :reach
),
raw as materialized (
  select r.*, row_number() over (order by r.place) as nth from (select 0 as span_no, s.* from scanned s union all select * from spanned) r
),
seen as materialized (
  select r.*, row_number() over (partition by r.queue_no order by r.nth) as nth_of_queue
    from raw r
   where (r.granted_until is null or r.granted_until <= (select now from clock)) and r.execution_id <> all(:skipped)
),
-- The limits of each queue, read once for its first entry and given to the others by the window: a join would compare all pairs.
limited as materialized (
  select s.nth, s.nth_of_queue, s.span_no, s.route_no, s.queue_no, s.place, s.partition_key, s.execution_id, s.tid,
         s.queue_no = any(:passed_queues::int[]) as is_passed, first_value(m.quota_key_nos) over w as quota_key_nos,
         first_value(m.budget_detail) over w as budget_detail, first_value(m.room) over w as room, first_value(m.slots) over w as slots,
         first_value(m.tokens) over w as tokens, first_value(m.has_guards) over w as has_guards, m.retry_after_ms
    from seen s
    left join lateral (
         select q.quota_key_nos, b.detail as budget_detail, k.slots, k.tokens, k.has_guards, k.retry_after_ms,
                case when b.detail is not null then 0 else k.room end as room
           from queue q
           left join lateral (
                select 'budget ' || b.budget_id || ': ' || u.dimension || ' ' || u.used || '/' || u.hard_limit as detail
                  from unnest(q.budget_ids) with ordinality b(budget_id, nth)
                 cross join lateral (
                       select l.dimension, l.hard_limit, u.used
                         from budget_limit l
                        cross join lateral (
                              select u.used from budget_usage u
                               where u.partition_key = l.partition_key and u.budget_id = l.budget_id and u.dimension = l.dimension limit 1) u
                        where l.budget_id = b.budget_id and l.hard_limit > 0 and u.used >= l.hard_limit
                       offset 0) u
                 order by b.nth, u.dimension limit 1) b on true
          cross join lateral (
                select array_agg(r.slots order by n.nth) as slots, array_agg(r.tokens order by n.nth) as tokens,
                       least(min(r.slots), min(r.tokens)) as room,
                       bool_or(p.max_requests_per_window > 0 or (
                         select true from quota_admission g where g.quota_key_no = k.quota_key_no and g.has_slot limit 1) is not null) as has_guards,
                       max(w.retry_after_ms) filter (where r.tokens <= 0) as retry_after_ms
                  from unnest(q.quota_key_nos) with ordinality as n(quota_key_no, nth)
                 cross join lateral (select k.* from quota_key k where k.quota_key_no = n.quota_key_no limit 1) k
                  left join lateral (
                       select p.* from quota_policy p
                        where p.partition_key = k.partition_key and p.quota_policy_id = k.quota_policy_id limit 1) p on true
                 cross join lateral (
                       select coalesce(sum(t.returned), 0) + (
                                select count(*) from quota_admission g
                                 where g.quota_key_no = k.quota_key_no and g.has_slot and g.guard_until <= (select now from clock)) as returned
                         from slot_return t where t.quota_key_no = k.quota_key_no offset 0) t
                 cross join lateral (
                       select coalesce(sum(w.tokens), 0) as tokens, min(w.at) - s.since as retry_after_ms
                         from (select (select now from clock) - coalesce(nullif(p.window_seconds, 0), 60) * 1000 as since) s
                         left join unnest(k.window_ats, k.window_tokens) w(at, tokens) on w.at > s.since
                        group by s.since offset 0) w
                 cross join lateral (
                       select case when p.max_concurrent > 0 then p.max_concurrent - k.taken + t.returned end as slots,
                              case when p.max_requests_per_window > 0 then
                                case when k.quota_key_no = any(:closed_keys::int[]) then 0 else p.max_requests_per_window - w.tokens end
                              end as tokens) r) k
          where q.queue_no = s.queue_no and s.nth_of_queue = 1 and (q.quota_key_nos <> '{}' or q.budget_ids <> '{}') limit 1) m on true
  window w as (partition by s.queue_no order by s.nth)
),
-- fits: there may be room for it. An execution that was admitted before needs no second token of the key, or has a slot.
candidate as materialized (
  select s.*, s.room is null or (not s.is_passed and s.nth_of_queue <= s.room) or a.is_admitted as fits
    from limited s
   cross join lateral (
         select case when s.room is null or (not s.is_passed and s.nth_of_queue <= s.room) or s.budget_detail is not null then false
                     when s.has_guards then not exists (
                       select from unnest(s.quota_key_nos, s.slots, s.tokens) as n(quota_key_no, slots, tokens)
                         left join lateral (
                              select g.has_slot from quota_admission g
                               where g.quota_key_no = n.quota_key_no and g.execution_id = s.execution_id
                                 and not g.is_released and g.guard_until > (select now from clock) limit 1) g on true
                        where (n.tokens < s.nth_of_queue and g.has_slot is null) or (n.slots <= 0 and g.has_slot is not true))
                     else false end as is_admitted offset 0) a
   where s.room is null or a.is_admitted or (not s.is_passed and (s.nth_of_queue <= s.room or s.nth_of_queue = 1))
),
-- The first entry of each queue for which the estimate leaves no room; if one before it takes less, it may have.
hidden as materialized (
  select l.queue_no, min(l.nth) as nth from limited l
   where (l.nth in (select c.nth from candidate c)) is not true group by l.queue_no
),
picked as materialized (
  select s.nth, s.route_no, s.queue_no, s.place, s.tid, s.quota_key_nos, s.budget_detail, s.has_guards,
         (select h.nth from hidden h where h.queue_no = s.queue_no) as hidden_nth, e.*
    from (select s.* from candidate s order by s.nth) s
   cross join lateral (select from ready l where l.ctid = s.tid for update skip locked) l
   cross join lateral (
         select e.partition_key, e.execution_id, e.lease_epoch, coalesce(e.quota_weight, 1) as weight,
                case when e.granted_until is not null then e.slot_keys end as slot_keys,
                e.eligibility_state = 'eligible_now' as is_markable,
                -- include: claim.branch
           from execution e
          where e.partition_key = s.partition_key and e.execution_id = s.execution_id
            and (e.eligibility_state in ('eligible_now', 'blocked_by_quota', 'blocked_by_budget')
                 or e.ownership_state in ('lease_expired_reclaimable', 'lease_revoked'))
            and (e.granted_until is null or e.granted_until <= (select now from clock))
            and (s.fits or e.eligibility_state = 'eligible_now')
            for update skip locked) e
   limit :limit
)
select p.branch, p.partition_key, p.execution_id, p.route_no, p.queue_no, p.place, p.lease_epoch, p.weight, p.slot_keys, p.quota_key_nos,
       p.budget_detail, p.is_markable, p.tid as entry, p.nth, p.hidden_nth, p.has_guards
  from picked p
union all
select 'kept', null, null, r.route_no, null, min(r.place), null, null, null, null, null, null, null, null, null, null
  from raw r
 -- `(... in (...)) is not true` makes the planner use a hashed subplan instead of a nested loop.
 where (r.execution_id in (select p.execution_id from picked p)) is not true
 group by r.route_no, r.place >> 48
union all
select 'span', null, null, null, null, min(r.place) filter (where (r.execution_id in (select p.execution_id from picked p)) is not true),
       count(*), r.span_no, null, null, null, null, null, null, null, null
  from raw r where r.span_no > 0 group by r.span_no
union all
select case when m.room > 0 then 'short' else 'full' end, null, null, null, m.queue_no, null, null, m.retry_after_ms, null, m.quota_key_nos,
       null, null, null, null, null, null
  from limited m where m.room is not null and m.nth_of_queue = greatest(m.room, 0) + 1
union all
select 'missed', null, m.execution_id, null, m.queue_no, m.place, null, null, null, null, null, null, null, null, null, null
  from candidate m
 where m.fits and (m.room is not null or m.span_no > 0) and (m.execution_id in (select p.execution_id from picked p)) is not true
   and ((select count(*) from picked) < :limit or m.nth < (select max(p.nth) from picked p))
union all
select 'read', null, null, null, null, c.ninth, c.scanned,
       case when cardinality(:span_sources) = 0
         then (extract(epoch from clock_timestamp() - statement_timestamp()) * 1000000)::bigint end, null, null, null,
       c.ninth is not null and c.scanned < :reach, null, null, null, null
  from (select (select max(ninth) from chosen) as ninth, (select count(*) from scanned) as scanned) c;

-- name: lease_admitted
-- Leases executions that the transaction has locked and admitted, in the order given.
with clock as materialized (select ff_now() as now, nextval('claim_sequence') as claim_no),
picked as materialized (
  select i.route_no, i.ready_tid, e.tid, i.nth, i.branch, case i.branch when 'resumed' then 'claim_resumed' end as reason,
         case i.branch when 'resumed' then e.remaining_attempt_timeout_ms
           else nullif((e.policy #>> '{timeout_policy,attempt_timeout_ms}')::bigint, 0) end as timeout_ms,
         e.attempt_timeout_at is not null as had_timeout, e.attached & 1 <> 0 as was_granted, e.attached & 4 <> 0 as had_stream,
         null::uuid as given_attempt_id, null::jsonb as given_policy, null::bigint as given_deadline_at, i.slot_keys::int[] as given_slot_keys,
         e.eligibility_state in ('blocked_by_quota', 'blocked_by_budget') as was_blocked
    from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :route_nos::int[], :entries::tid[], :branches::text[], :slot_keys::text[])
         with ordinality as i(partition_key, execution_id, route_no, ready_tid, branch, slot_keys, nth)
   cross join lateral (
         select e.ctid as tid, e.attempt_timeout_at, e.attached, e.remaining_attempt_timeout_ms, e.policy,
                e.eligibility_state
           from execution e
          where e.partition_key = i.partition_key and e.execution_id = i.execution_id limit 1) e
),
-- include: claim.leased
-- include: claim.answer
;

-- name: list_queues
-- The lane and the kind of queues.
select q.queue_no, l.lane_id, k.execution_kind
  from unnest(:queue_nos::int[]) as i(queue_no)
 cross join lateral (select q.queue_no, q.lane_no, q.kind_no from queue q where q.queue_no = i.queue_no limit 1) q
  join lane l using (lane_no)
  join kind k using (kind_no);
