-- name: take_old_identities
-- Deletes the identities of worker processes that were last used more than :memory_ms ago, the oldest first; returns how
-- many. Those that a live or a lost lease refers to are marked as used now, so that they are not checked again soon.
with clock as materialized (select ff_now() as now),
old as materialized (
  select w.ctid as tid, w.worker_no from worker_identity w
   where w.seen_at < (select now from clock) - :memory_ms::bigint
   order by w.seen_at limit :limit
     for update skip locked
),
-- Reads each claim and each lost lease once, however many identities are old.
named as materialized (
  select c.worker_no from claim c
  union
  select e.worker_no
    from listed l
   cross join lateral (
         select e.worker_no from execution e
          where e.partition_key = l.partition_key and e.execution_id = l.execution_id and e.ownership_state <> 'unowned'
          limit 1) e
   where l.public_state = 'active'
),
kept as (
  update worker_identity w set seen_at = c.now
    from clock c
   where w.ctid = any(array(select o.tid from old o join named n using (worker_no)))
),
deleted as (
  delete from worker_identity
   where ctid = any(array(select o.tid from old o left join named n using (worker_no) where n.worker_no is null))
  returning 1
)
select count(*) as purged from deleted;
