-- name: analyze
-- Statistics, as autovacuum would have taken them.
analyze;

-- name: vacuum
-- What autovacuum would have done.
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
-- A first read, from which on a transaction that repeats its reads holds back every dead row.
select exists (select from flowfabric.execution);

-- name: checkpoint
-- A checkpoint, at once.
checkpoint;

-- name: is_alone
-- Whether no other session is connected to this database but for those that hold a transaction open.
select not exists (select from pg_stat_activity
                    where datname = current_database() and pid <> pg_backend_pid()
                      and backend_type = 'client backend' and state is distinct from 'idle in transaction');

-- name: read_backend
-- The process that serves this session.
select pg_backend_pid();

-- name: read_position
-- How many bytes of log the server has written.
select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint;

-- name: read_writes
-- How many rows of all tables were inserted, updated and deleted so far.
select coalesce(sum(n_tup_ins + n_tup_upd + n_tup_del), 0)::bigint from pg_stat_user_tables;

-- name: read_updates
-- How many rows of executions were updated so far, and how many of them without a new index entry.
select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relname = 'execution';

-- name: read_index_entries
-- How many index entries were read so far.
select coalesce(sum(idx_tup_read), 0)::bigint from pg_stat_user_indexes;
