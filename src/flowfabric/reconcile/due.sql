-- name: read_due
-- The work that waits for each sweep: the number of due timers of each kind among the oldest :sample after :due_since, the
-- oldest due time, the time of the next timer if it is within :ahead_ms, the longest due projection of a flow after :projected_since,
-- and how long this statement took.
with clock as materialized (select ff_now() as now),
due as materialized (
  select k.kind, t.due_at
    from clock c
   cross join unnest(enum_range(null::timer_kind)) as k(kind)
   cross join lateral (
         select t.due_at from timer t
          where t.kind = k.kind and t.due_at > :due_since and t.due_at <= c.now
          order by t.due_at limit :sample) t
),
claims as materialized (
  select r.expires_at
    from clock c
   cross join lateral (
         select r.expires_at from claim r
          where r.expires_at > :due_since and r.expires_at <= c.now
          order by r.expires_at limit :sample) r
),
-- An entry of the cascade is due when the process that queued it has had time to settle it.
entry as materialized (
  select min(e.queued_at) as queued_at
    from (select e.queued_at from cascade_entry e
           where e.queued_at > :due_since - :left_over_ms::bigint and e.queued_at <= (select now from clock) - :left_over_ms
           order by e.queued_at limit 1) e
)
select (select count(*) from claims) as expired_claims,
       count(*) filter (where d.kind = 'delay') as elapsed_delays,
       count(*) filter (where d.kind in ('attempt_timeout', 'deadline')) as expiries,
       count(*) filter (where d.kind = 'suspension_timeout') as suspension_timeouts,
       exists (select from retained
                where retain_until > :retained_since and retain_until <= (select now from clock)) as has_retained,
       exists (select from idempotency_key where expires_at <= (select now from clock)) as has_expired_keys,
       exists (select from waitpoint
                where activated_at is null and closed_at is null and expires_at <= (select now from clock)) as has_expired_waitpoints,
       exists (select from stream where sweep_at <= (select now from clock)) as has_due_streams,
       exists (select from pending_cancel_group where enqueued_at <= (select now from clock)) as has_pending_groups,
       exists (select from cancel_backlog where grace_until <= (select now from clock)) as has_due_cancellations,
       exists (select from budget_account where next_reset_at <= (select now from clock)) as has_due_budgets,
       exists (select from budget_account) as has_budgets,
       (select f.project_at from flow f
         where f.project_at > :projected_since::bigint and f.project_at <= (select now from clock)
         order by f.project_at limit 1) as oldest_projection_at,
       exists (select from claim_grant
                where expires_at <= (select now from clock) - :grant_memory_ms::bigint and not has_slots) as has_old_grants,
       -- Also those that an operator has blocked, and that are not unblocked by a sweep.
       exists (select from listed where public_state = 'rate_limited') or exists (select from listed where public_state = 'waiting')
         as has_blocked,
       exists (select from quota_key) as has_quota_keys,
       exists (select from claim_grant where has_slots and expires_at <= (select now from clock)) as has_expired_slots,
       exists (select from quota_admission where guard_until <= (select now from clock) and not has_slot) as has_expired_guards,
       exists (select from worker where lapses_at < (select now from clock)) as has_expired_workers,
       exists (select from worker_identity
                where seen_at < (select now from clock) - :identity_memory_ms::bigint) as has_old_identities,
       exists (select from ff_silent_sessions(:silent_ms)) as has_silent_sessions,
       least(
         (select min(t.due_at)
            from unnest(enum_range(null::timer_kind)) as k(kind)
           cross join lateral (
                 select t.due_at from timer t
                  where t.kind = k.kind and t.due_at > (select now from clock) and t.due_at <= (select now from clock) + :ahead_ms::bigint
                  order by t.due_at limit 1) t),
         (select min(r.expires_at) from claim r
           where r.expires_at > (select now from clock) and r.expires_at <= (select now from clock) + :ahead_ms)) - c.now as next_due_in_ms,
       (select queued_at from entry) as oldest_entry_at,
       least(min(d.due_at), (select min(expires_at) from claims), (select queued_at + :left_over_ms from entry), c.now) as oldest_due_at, c.now,
       (extract(epoch from clock_timestamp() - statement_timestamp()) * 1000)::bigint as took_ms
  from clock c left join due d on true
 group by c.now;
