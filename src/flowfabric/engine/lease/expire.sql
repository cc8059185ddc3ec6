-- name: take_spent_claims
-- Deletes expired claims that no execution is leased under any more, the oldest after :since first. The first row has the number
-- of claims read, the number deleted, and the latest expiry; each other row is an execution still leased under one of them.
-- An execution that left a claim never returns to it, so its members are read without locks.
with clock as materialized (select ff_now() as now),
due as materialized (
  select r.*
    from clock c
   cross join lateral (
         select r.ctid as tid, r.partition_key, r.claim_no, r.expires_at, r.execution_ids from claim r
          where r.expires_at > :since and r.expires_at <= c.now
            -- A claim with no members except quarantined ones must not use up the limit.
            and (not r.execution_ids && :skipped::uuid[] or exists (
                select from unnest(r.execution_ids) as m(execution_id)
                 cross join lateral (
                       select e.claim_no, e.ownership_state from execution e
                        where e.partition_key = r.partition_key and e.execution_id = m.execution_id limit 1) e
                 where m.execution_id <> all(:skipped) and e.claim_no = r.claim_no and e.ownership_state = 'leased'))
          order by r.expires_at limit :limit
            for update skip locked) r
),
member as materialized (
  select d.tid, e.partition_key, e.execution_id
    from due d
   cross join lateral unnest(d.execution_ids) as m(execution_id)
   cross join lateral (
         select e.partition_key, e.execution_id, e.claim_no, e.ownership_state from execution e
          where e.partition_key = d.partition_key and e.execution_id = m.execution_id limit 1) e
   where e.claim_no = d.claim_no and e.ownership_state = 'leased'
),
spent as (
  delete from claim where ctid = any(array(select tid from due except select tid from member)) returning 1
)
select null::smallint as partition_key, null::uuid as execution_id, count(*) as claims, (select count(*) from spent) as spent,
       max(expires_at) as reached
  from due
union all
select partition_key, execution_id, 0, 0, null from member where execution_id <> all(:skipped);

-- name: list_expired_leases
-- Leases of active executions that expire by :as_of, marked or not, ordered by expiry, then id.
with clock as materialized (select coalesce(:as_of::bigint, ff_now()) as as_of),
expired as (
  select e.*, r.expires_at
    from clock c
   cross join lateral (
         select r.partition_key, r.claim_no, r.expires_at, r.execution_ids from claim r where r.expires_at <= c.as_of) r
   cross join lateral unnest(r.execution_ids) as m(execution_id)
   cross join lateral (
         select e.partition_key, e.execution_id, e.namespace_no, e.lease_id, e.lease_epoch, e.worker_no, e.attempt_count from execution e
          where e.partition_key = r.partition_key and e.execution_id = m.execution_id and e.claim_no = r.claim_no
            and e.ownership_state = 'leased' limit 1) e
  union all
  select e.*, l.at
    from clock c
   cross join lateral (
         select l.partition_key, l.execution_id, l.at from listed l where l.public_state = 'active' and l.at <= c.as_of) l
   cross join lateral (
         select e.partition_key, e.execution_id, e.namespace_no, e.lease_id, e.lease_epoch, e.worker_no, e.attempt_count from execution e
          where e.partition_key = l.partition_key and e.execution_id = l.execution_id
            and e.ownership_state = 'lease_expired_reclaimable' limit 1) e
),
found as (
  select ('{fp:' || partition_key || '}:' || execution_id) collate "C" as id, lease_id, lease_epoch, worker_no,
         expires_at as lease_expires_at, attempt_count - 1 as attempt_index
    from expired
   where :namespace::text is null or namespace_no = (select namespace_no from namespace where namespace = :namespace)
)
select f.id, f.lease_id, f.lease_epoch, w.worker_instance_id, f.lease_expires_at, f.attempt_index
  from (select * from found
         where :after_expires_at::bigint is null or (lease_expires_at, id) > (:after_expires_at, :after_id::text collate "C")
         order by lease_expires_at, id limit :limit) f
  left join worker_identity w using (worker_no)
 order by f.lease_expires_at, f.id;

-- name: lock_expired
-- Locks executions whose attempt timeout or deadline has passed, the oldest after :since first, except :skipped; returns
-- what the decision to retry needs.
with clock as materialized (select ff_now() as now),
due as materialized (
  select distinct t.partition_key, t.execution_id
    from clock c
   cross join unnest('{attempt_timeout,deadline}'::timer_kind[]) as k(kind)
   cross join lateral (
         select t.partition_key, t.execution_id from timer t
          where t.kind = k.kind and t.due_at > :since and t.due_at <= c.now and t.execution_id <> all(:skipped::uuid[])
          order by t.due_at limit :limit) t
)
select e.partition_key, e.execution_id, e.retry_count, e.lease_epoch, e.lifecycle_phase, e.policy,
       coalesce(e.deadline_at <= c.now, false) as past_deadline
  from due d
 cross join clock c
 cross join lateral (
       select e.partition_key, e.execution_id, e.retry_count, e.lease_epoch, e.lifecycle_phase, e.policy, e.deadline_at
         from execution e
        where e.partition_key = d.partition_key and e.execution_id = d.execution_id
          and (e.deadline_at <= c.now or (e.lifecycle_phase = 'active' and e.attempt_timeout_at <= c.now))
          and e.lifecycle_phase <> 'terminal'
          for update skip locked) e
 limit :limit;

-- name: read_expiry
-- Whether the deadline or the attempt timeout of a locked execution has passed, and what the decision to retry needs.
select e.partition_key, e.execution_id, e.retry_count, e.lease_epoch, e.lifecycle_phase, e.policy,
       coalesce(e.deadline_at <= c.now, false) as past_deadline,
       e.lifecycle_phase = 'active' and coalesce(e.attempt_timeout_at <= c.now, false) as past_timeout
  from (select ff_now() as now) c
 cross join execution e
 where e.partition_key = :partition_key and e.execution_id = :execution_id;
