-- name: end_silent_sessions
-- Ends the sessions that have waited for their client longer than :silent_ms in the middle of a statement.
select pid from ff_silent_sessions(:silent_ms) as pid where pg_terminate_backend(pid) limit :limit;
