-- name: lock_limits
-- Waits until no other transaction of this schema inserts queues or changes what limits are attached to.
select pg_advisory_xact_lock(hashtextextended('flowfabric limits ' || current_schema(), 0));

-- name: insert_capability_set
-- The number of a set of required capabilities, inserted if new; no row if another transaction is inserting it.
with made as (
  insert into capability_set (required, digest)
  select :required, :digest where not exists (select from capability_set where digest = :digest)
  on conflict do nothing returning capability_set_no)
select capability_set_no from made union all select capability_set_no from capability_set where digest = :digest;

-- name: insert_route
-- The number of a route, inserted if new; no row if another transaction is inserting it.
with made as (
  insert into route (lane_no, capability_set_no)
  select :lane_no, :capability_set_no
   where not exists (select from route where lane_no = :lane_no and capability_set_no = :capability_set_no)
  on conflict do nothing returning route_no)
select route_no from made
union all
select route_no from route where lane_no = :lane_no and capability_set_no = :capability_set_no;

-- name: insert_quota_keys
-- The numbers of keys of quotas, inserted in their order if new; no row for one that another transaction is inserting.
with given as (
  select * from unnest(:partition_keys::smallint[], :quota_policy_ids::uuid[], :keys::text[]) with ordinality
    as i(partition_key, quota_policy_id, key, nth)
),
known as materialized (
  select i.nth, i.partition_key, i.quota_policy_id, i.key, k.quota_key_no
    from given i
    left join lateral (
         select k.quota_key_no from quota_key k
          where k.partition_key = i.partition_key and k.quota_policy_id = i.quota_policy_id and k.key = i.key limit 1) k on true
),
made as (
  insert into quota_key (partition_key, quota_policy_id, key)
  select partition_key, quota_policy_id, key from known where quota_key_no is null order by nth
  on conflict do nothing
  returning partition_key, quota_policy_id, key, quota_key_no
)
select nth, quota_key_no from known where quota_key_no is not null
union all
select i.nth, m.quota_key_no from made m join known i using (partition_key, quota_policy_id, key);

-- name: insert_admission_keys
-- Inserts admission keys that do not exist yet.
insert into admission_key (digest, quota_key_nos, attached_key_nos, budget_ids, fair_key)
select digest, quota_key_nos::int[], attached_key_nos::int[], budget_ids::uuid[], fair_key
  from unnest(:digests::bytea[], :quota_key_nos::text[], :attached_key_nos::text[], :budget_ids::text[], :fair_keys::text[])
       as i(digest, quota_key_nos, attached_key_nos, budget_ids, fair_key)
 where not exists (select from admission_key k where k.digest = i.digest)
 order by digest
on conflict do nothing;

-- fragment: given
-- The queues that are asked for, by the numbers of their names; those with a digest that is not stored have no admission key.
given as materialized (
  select i.nth, i.lane_no, i.kind_no, i.namespace_no, i.capability_set_no,
         case when i.digest is null then 0 else (select k.admission_key_no from admission_key k where k.digest = i.digest) end
           as admission_key_no
    from unnest(:lane_nos::int[], :kind_nos::int[], :namespace_nos::int[], :capability_set_nos::int[], :digests::bytea[])
         with ordinality as i(lane_no, kind_no, namespace_no, capability_set_no, digest, nth)
)

-- fragment: limits
-- All limits of each queue s: of its admission key, the budgets in their order, and those attached to its lane, its namespace and its
-- kind. An attached quota counts by the key that the admission key has for it, else by the key of executions that have none.
cross join lateral (
  select coalesce(max(l.lane_id), '') as lane_id, bool_or(l.fair_by is not null or l.ageing_ms is not null) as is_fair
    from lane l where l.lane_no = s.lane_no) l
cross join lateral (
  select (select n.namespace from namespace n where n.namespace_no = s.namespace_no) as namespace,
         (select k.execution_kind from kind k where k.kind_no = s.kind_no) as execution_kind) n
left join admission_key k on k.admission_key_no = s.admission_key_no
cross join lateral (
  select coalesce(array_agg(b.budget_id order by b.nth), '{}') as budget_ids
    from (select u.budget_id, min(u.nth) as nth
            from (select b.budget_id, b.nth from unnest(k.budget_ids) with ordinality as b(budget_id, nth)
                  union all
                  select a.limit_id, 1000 + row_number() over (order by a.attached_at, a.limit_id)
                    from limit_attachment a
                   where a.limit_type = 'budget'
                     and (a.scope_type, a.scope_id) in (('lane', l.lane_id), ('namespace', n.namespace), ('kind', n.execution_kind))) u
           group by u.budget_id) b) b
cross join lateral (
  select coalesce(array_agg(distinct u.quota_key_no order by u.quota_key_no), '{}') as quota_key_nos
    from (select unnest(k.quota_key_nos) as quota_key_no
          union all
          select coalesce(
                   (select own.quota_key_no from unnest(k.quota_key_nos || k.attached_key_nos) with ordinality as own(quota_key_no, nth)
                     cross join lateral (
                           select c.quota_policy_id from quota_key c where c.quota_key_no = own.quota_key_no limit 1) c
                     where c.quota_policy_id = a.limit_id order by own.nth limit 1),
                   a.quota_key_no)
            from limit_attachment a
           where a.limit_type = 'quota'
             and (a.scope_type, a.scope_id) in (('lane', l.lane_id), ('namespace', n.namespace), ('kind', n.execution_kind))) u) q

-- name: find_queues
-- The numbers of the queues that exist, and whether their limits are those that they should have.
with
-- include: given
,
found as materialized (
  select i.nth, q.*, cardinality(ff_required(q.required)) < cardinality(q.required) as is_hidden
    from given i
   cross join lateral (
         select q.queue_no, q.route_no, q.lane_no, q.kind_no, q.namespace_no, q.admission_key_no, q.quota_key_nos as stored_key_nos,
                q.budget_ids as stored_budget_ids, c.required
           from queue q join route r using (route_no) join capability_set c using (capability_set_no)
          where q.lane_no = i.lane_no and q.kind_no = i.kind_no and q.namespace_no = i.namespace_no
            and q.admission_key_no = i.admission_key_no
            and ff_required(c.required) = (select w.required from capability_set w where w.capability_set_no = i.capability_set_no)
          order by q.queue_no limit 1) q
)
select s.nth, s.queue_no, s.route_no,
       s.stored_key_nos = q.quota_key_nos and s.stored_budget_ids = b.budget_ids
       and (s.is_hidden or not (l.is_fair or q.quota_key_nos <> '{}' or b.budget_ids <> '{}')) as is_current
  from found s
-- include: limits
;

-- name: read_queue_limits
-- All limits of queues that do not exist yet, in the order given, and whether only claims with admission may see them.
with
-- include: given
select s.admission_key_no, q.quota_key_nos, b.budget_ids, l.is_fair or q.quota_key_nos <> '{}' or b.budget_ids <> '{}' as is_governed
  from given s
-- include: limits
 order by s.nth;

-- name: list_routes
-- The routes of lanes and what they require, the oldest first.
select r.route_no, r.lane_no, c.required from route r join capability_set c using (capability_set_no)
 where r.lane_no = any(:lane_nos::int[])
 order by r.route_no;

-- name: insert_queues
-- Inserts queues with all their limits.
insert into queue (route_no, lane_no, kind_no, namespace_no, admission_key_no, quota_key_nos, budget_ids, fair_key)
select route_no, lane_no, kind_no, namespace_no, admission_key_no, quota_key_nos::int[], budget_ids::uuid[], fair_key
  from unnest(:route_nos::int[], :lane_nos::int[], :kind_nos::int[], :namespace_nos::int[], :admission_key_nos::int[],
              :quota_key_nos::text[], :budget_ids::text[], :fair_keys::text[])
       as i(route_no, lane_no, kind_no, namespace_no, admission_key_no, quota_key_nos, budget_ids, fair_key)
on conflict do nothing;

-- name: set_queue_limits
-- Gives queues the limits that they should have; returns their routes and lanes.
with limited as materialized (
  select s.queue_no, q.quota_key_nos, b.budget_ids
    from queue s
-- include: limits
   where s.queue_no = any(:queue_nos::int[])
),
changed as (
  update queue q set quota_key_nos = c.quota_key_nos, budget_ids = c.budget_ids
    from limited c
   where q.queue_no = c.queue_no and (q.quota_key_nos, q.budget_ids) is distinct from (c.quota_key_nos, c.budget_ids)
)
select distinct q.route_no, q.lane_no from queue q where q.queue_no = any(:queue_nos);

-- name: list_governed
-- Routes, what they require, and whether only claims with admission may see them.
select r.route_no, r.lane_no, c.required,
       l.fair_by is not null or l.ageing_ms is not null
       or exists (
            select from queue q
             where q.lane_no = r.lane_no and q.route_no = r.route_no and (q.quota_key_nos <> '{}' or q.budget_ids <> '{}')) as is_governed
  from route r join capability_set c using (capability_set_no) join lane l using (lane_no)
 where r.route_no = any(:route_nos::int[])
 order by r.route_no;

-- name: set_route_capabilities
-- Changes what a route requires.
update route set capability_set_no = :capability_set_no where route_no = :route_no;
