-- name: analyze
-- Updates the planner statistics, as autovacuum would.
analyze;

-- name: vacuum
-- Vacuums and analyzes, as autovacuum would.
vacuum analyze;

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

-- name: see_executions
-- A read that takes the snapshot of a repeatable-read transaction, which keeps dead rows from being removed.
select exists (select from flowfabric.execution);

-- name: checkpoint
-- Runs a checkpoint immediately.
checkpoint;

-- name: is_alone
-- Whether no other session is connected to this database, except sessions idle in a transaction.
select not exists (select from pg_stat_activity
                    where datname = current_database() and pid <> pg_backend_pid()
                      and backend_type = 'client backend' and state is distinct from 'idle in transaction');

-- name: read_backend
-- The process id of the backend of this session.
select pg_backend_pid();

-- name: read_position
-- The number of bytes of write-ahead log that the server has written.
select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint;

-- name: read_writes
-- The number of rows inserted, updated and deleted in all tables so far.
select coalesce(sum(n_tup_ins + n_tup_upd + n_tup_del), 0)::bigint from pg_stat_user_tables;

-- name: read_updates
-- The number of updates of `execution` so far, and how many of them were HOT updates.
select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relname = 'execution';

-- name: read_index_entries
-- The number of index entries read so far.
select coalesce(sum(idx_tup_read), 0)::bigint from pg_stat_user_indexes;
