-- name: analyze
-- Statistics, as autovacuum would have taken them.
analyze;

-- name: pgqueuer_is_drained
-- Whether every job of PgQueuer has ended.
select not exists (select from pgqueuer);

-- name: procrastinate_is_drained
-- Whether every job of Procrastinate has ended.
select not exists (select from procrastinate_jobs where status in ('todo', 'doing'));

-- name: absurd_is_drained
-- Whether every task of Absurd has ended.
select not exists (select from absurd.t_bench where state <> 'completed');

-- name: dbos_is_drained
-- Whether every workflow of DBOS has ended.
select not exists (select from dbos.workflow_status where status in ('ENQUEUED', 'PENDING'));
