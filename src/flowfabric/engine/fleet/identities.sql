-- name: take_old_identities
-- Deletes the identities of worker processes that nobody has used for so long and that hold no claim; answers how many.
with gone as (
  delete from worker_identity
   where ctid = any(array(
         select w.ctid from worker_identity w
          where w.seen_at < (select ff_now()) - :memory_ms::bigint
            and not exists (select from claim c where c.worker_no = w.worker_no)
          order by w.seen_at limit :limit for update skip locked))
  returning 1)
select count(*) as purged from gone;
