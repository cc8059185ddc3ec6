-- name: pgqueuer_is_drained
-- Whether every job has ended.
select not exists (select from pgqueuer);

-- name: procrastinate_is_drained
-- Whether every job has ended.
select not exists (select from procrastinate_jobs where status in ('todo', 'doing'));
