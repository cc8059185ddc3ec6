-- name: read_reasons
-- One execution and what it waits for: how many are ahead of it, how many workers could run it, its waitpoints, up to :edges of its
-- unresolved dependencies, and its last failure. The executions ahead are counted over all routes of its lane, in its own queue if the
-- lane is fair, up to :most. If it was skipped, up to :edges of its dependencies that ended without success; those whose upstream
-- execution was skipped too come last. If it can be claimed or a limit blocks it, what its budgets and its keys of quotas have admitted.
with clock as materialized (select ff_now() as now),
subject as materialized (
  select e.partition_key, e.execution_id, e.place, e.lifecycle_phase, e.ownership_state, e.eligibility_state, e.blocking_reason,
         e.terminal_outcome, e.attempt_state, e.public_state, e.last_transition_at, e.blocking_detail, e.delay_until,
         e.lease_expires_at, e.attempt_count, e.reclaim_count, e.completed_at, e.failure_reason, e.cancellation_reason,
         e.lane_no, e.granted_until, e.suspension_id, e.flow_id, l.lane_id, l.state as lane_state, ff_required(c.required) as required, n.namespace,
         e.execution_kind, e.policy, w.worker_id, w.worker_instance_id,
         e.queue_no, q.quota_key_nos, q.budget_ids, x.quota_weight, x.slot_keys, l.fair_by is not null as is_fair,
         (select true from ready r where r.route_no = q.route_no and r.queue_no = e.queue_no and r.place = e.place) is not null as is_claimable
    from execution_detail e
    left join lateral (
         select x.quota_weight, x.slot_keys from execution x
          where x.partition_key = e.partition_key and x.execution_id = e.execution_id limit 1) x on true
    left join lateral (select n.namespace from namespace n where n.namespace_no = e.namespace_no limit 1) n on true
    left join lane l on l.lane_no = e.lane_no
    left join queue q on q.queue_no = e.queue_no
    left join route t on t.route_no = q.route_no
    left join capability_set c on c.capability_set_no = t.capability_set_no
    left join worker_identity w on w.worker_no = e.worker_no
   where e.partition_key = :partition_key and e.execution_id = :execution_id
),
-- The live workers of its lane, and which of them serve its namespace, its kind and its required capabilities.
live as materialized (
  select w.capabilities, n.serves_namespace, n.serves_namespace and k.serves_kind as serves_kind,
         n.serves_namespace and k.serves_kind and w.capabilities @> coalesce(s.required, '{}') as can_run
    from subject s
   cross join clock c
    join worker w on s.lane_id = any(w.lanes) and w.lapses_at > c.now
   cross join lateral (select w.serves_all_namespaces or w.namespace = s.namespace as serves_namespace) n
   cross join lateral (select w.kinds is null or s.execution_kind = any(w.kinds) as serves_kind) k
   where s.is_claimable or s.eligibility_state = 'blocked_by_route'
),
-- Its limits, as far as they hold it back. A suspended execution may wait for a budget.
limited as materialized (
  select s.quota_key_nos, s.budget_ids, s.quota_weight, s.slot_keys, s.execution_id, s.queue_no,
         s.is_claimable or s.eligibility_state in ('blocked_by_budget', 'blocked_by_quota') as needs_quotas
    from subject s cross join clock c
   where (s.is_claimable and (s.granted_until <= c.now) is not false)
      or s.eligibility_state in ('blocked_by_budget', 'blocked_by_quota')
      or (s.lifecycle_phase = 'suspended' and s.blocking_reason = 'waiting_for_budget')
),
spent as materialized (
  select jsonb_agg(jsonb_build_array(b.budget_id, b.dimension, b.used, b.hard_limit, a.next_reset_at) order by b.nth, b.dimension) as budgets
    from limited m
   cross join lateral ff_spent_dimensions(m.budget_ids) b
    left join lateral (
         select a.next_reset_at from budget_account a
          where a.partition_key = b.partition_key and a.budget_id = b.budget_id limit 1) a on true
),
keyed as materialized (
  select jsonb_agg(jsonb_build_array(u.quota_policy_id, u.key, u.key_from, u.max_requests_per_window, u.window_seconds, u.max_concurrent,
                                     u.used, u.window_ats, u.window_tokens, coalesce(g.has_token, false),
                                     coalesce(g.has_slot, false) or coalesce(u.quota_key_no = any(m.slot_keys), false))
                   order by u.quota_key_no) as keys,
         bool_or(u.max_concurrent > 0 and u.used >= u.max_concurrent) as has_no_slot
    from limited m
   cross join clock c
   cross join lateral ff_key_use(m.quota_key_nos, c.now) u
    left join lateral (
         select not g.is_released as has_token, g.has_slot from quota_admission g
          where g.quota_key_no = u.quota_key_no and g.execution_id = m.execution_id and g.guard_until > c.now limit 1) g on true
   where m.needs_quotas and u.window_seconds is not null
),
-- How long the latest runs of its queue took, as far as they are among the :batches batches kept the longest.
lasted as materialized (
  select avg(e.ran)::bigint as run_ms
    from (select i.partition_key, i.execution_id
            from (select r.partition_key, r.execution_ids, r.queue_no, r.queue_nos from retained r
                   where (select k.has_no_slot from keyed k) and r.retain_until > (select now from clock)
                   order by r.retain_until desc limit :batches) r
           cross join lateral (
                 select r.partition_key, i.execution_id
                   from unnest(r.execution_ids, r.queue_nos) as i(execution_id, queue_no)
                  where coalesce(r.queue_no, i.queue_no) = (select m.queue_no from limited m)) i
           limit :runs) i
   cross join lateral (
         select e.last_transition_at - e.claimed_at as ran from execution e
          where e.partition_key = i.partition_key and e.execution_id = i.execution_id and e.lifecycle_phase = 'terminal'
            and e.last_transition_at >= e.claimed_at limit 1) e
),
serving as materialized (
  select count(*) as on_lane, count(*) filter (where serves_namespace) as of_namespace,
         count(*) filter (where serves_kind) as of_kind, count(*) filter (where can_run) as workers
    from live
)
select s.lifecycle_phase, s.ownership_state, s.eligibility_state, s.blocking_reason, s.terminal_outcome, s.attempt_state,
       s.public_state, s.last_transition_at, s.blocking_detail, s.delay_until, s.lease_expires_at, s.attempt_count,
       s.reclaim_count, s.completed_at, s.failure_reason, s.cancellation_reason, s.lane_id, s.lane_state, s.policy,
       s.worker_id, s.worker_instance_id, s.is_claimable, c.now,
       case when s.is_claimable and s.is_fair then (
         select count(*) from (select 1 from ready r where r.queue_no = s.queue_no and r.place < s.place order by r.place limit :most) b)
       when s.is_claimable then (
         select count(*)
           from (select 1
                   from route t
                  cross join lateral (
                        select 1 from ready r where r.route_no = t.route_no and r.place < s.place
                         order by r.place limit :most) r
                  where t.lane_no = s.lane_no
                  limit :most) b) end as ahead,
       s.is_fair, b.budgets as spent, y.keys as quota_keys, z.run_ms, s.quota_weight, s.required, s.namespace, s.execution_kind, v.on_lane, v.of_namespace, v.of_kind, v.workers,
       array(select unnest(s.required) except select unnest(w.capabilities) from live w where w.serves_kind) as unoffered,
       case when s.granted_until > c.now then s.granted_until end as granted_until,
       g.worker_id as granted_worker_id, g.worker_instance_id as granted_worker_instance_id,
       p.suspension_id, p.reason_code, p.timeout_at, p.waitpoints,
       s.partition_key, d.policy as group_policy, d.k as group_k, d.on_satisfied as group_on_satisfied, d.staged_count, d.unmet_count,
       d.impossible_count, d.unmet_edges,
       f.attempt_index as failed_index, f.failure_reason as last_failure_reason, f.failure_category as last_failure_category
  from subject s
 cross join clock c
 cross join serving v
 cross join spent b
 cross join keyed y
 cross join lasted z
  left join lateral (
       select g.worker_id, g.worker_instance_id, g.expires_at from claim_grant g
        where g.partition_key = s.partition_key and g.execution_id = s.execution_id limit 1) g on g.expires_at = s.granted_until
  left join lateral (
       select p.suspension_id, p.reason_code, p.timeout_at,
              (select jsonb_agg(jsonb_build_array(w.waitpoint_id, w.waitpoint_key, w.required_signal_names) order by b.nth)
                 from unnest(p.waitpoint_ids) with ordinality b(waitpoint_id, nth)
                cross join lateral (
                      select w.waitpoint_id, w.waitpoint_key, w.required_signal_names from waitpoint w
                       where w.partition_key = s.partition_key and w.waitpoint_id = b.waitpoint_id
                         and w.state in ('pending', 'active') offset 0) w) as waitpoints
         from suspension p
        where p.partition_key = :partition_key and p.execution_id = :execution_id and p.suspension_id = s.suspension_id
          and s.lifecycle_phase = 'suspended' and p.closed_at is null offset 0) p on true
  left join lateral (
       select d.policy, d.k, d.on_satisfied, d.staged_count, d.failed_count + d.skipped_count as impossible_count,
              d.staged_count - d.succeeded_count - d.failed_count - d.skipped_count as unmet_count,
              (select jsonb_agg(jsonb_build_array(x.edge_id, x.upstream_id, x.state, u.public_state, u.execution_kind)
                                order by u.public_state is not distinct from 'skipped', x.edge_id)
                 from (select x.edge_id, x.upstream_id, x.state from edge x
                        where x.downstream_id = s.execution_id and x.partition_key is not distinct from s.partition_key
                          and x.flow_id is not distinct from s.flow_id
                          and case s.terminal_outcome when 'skipped' then x.state = 'impossible' else x.state in ('staged', 'unsatisfied') end
                        limit :edges) x
                 left join lateral (
                      select u.public_state, k.execution_kind
                        from execution u
                        left join queue q on q.queue_no = u.queue_no
                        left join kind k on k.kind_no = q.kind_no
                       where u.partition_key = s.partition_key and u.execution_id = x.upstream_id
                         and u.flow_id is not distinct from s.flow_id
                       limit 1) u on true) as unmet_edges
         from edge_group d
        where d.partition_key = s.partition_key and d.flow_id = s.flow_id and d.downstream_id = s.execution_id
          and (s.eligibility_state = 'blocked_by_dependencies' or s.terminal_outcome = 'skipped') limit 1) d on true
  left join lateral (
       select a.attempt_index, a.failure_reason, a.failure_category
         from attempt a
        where a.partition_key = s.partition_key and a.execution_id = s.execution_id
          and s.lifecycle_phase = 'runnable' and s.delay_until is not null and a.attempt_state = 'ended_failure'
        order by a.attempt_index desc limit 1) f on true;
