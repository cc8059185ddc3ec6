-- name: list_broken_keys
-- Keys of quotas whose slots in use are not those of what holds them: executions with a lease or a grant, and guards. The slots of expired
-- leases, grants and guards are in use until a sweep returns them, so it does not matter that they have expired; tokens older than the
-- window are dropped by the next admission.
with holder as materialized (
  select h.quota_key_no, count(*) as slots
    from (select s.quota_key_no
            from (select m.partition_key, i.execution_id from claim m cross join lateral unnest(m.execution_ids) as i(execution_id)
                  union
                  select g.partition_key, g.execution_id from claim_grant g) i
           cross join lateral (
                 select e.slot_keys from execution e
                  where e.partition_key = i.partition_key and e.execution_id = i.execution_id and e.attached & 8 <> 0
                    and (e.ownership_state = 'leased' or e.granted_until is not null) limit 1) e
           cross join lateral unnest(e.slot_keys) as s(quota_key_no)
          union all
          select a.quota_key_no from quota_admission a where a.has_slot) h
   group by h.quota_key_no
)
select k.quota_policy_id, k.key, rule.problem
  from quota_key k
  left join holder h on h.quota_key_no = k.quota_key_no
 cross join lateral (
       select coalesce(sum(r.returned), 0)::bigint as returned from slot_return r where r.quota_key_no = k.quota_key_no) r
 cross join lateral (values
       ('its slots in use are ' || k.taken - r.returned || ', but ' || coalesce(h.slots, 0) || ' are held',
        k.taken - r.returned <> coalesce(h.slots, 0)),
       ('its window has not as many times as tokens', cardinality(k.window_ats) <> cardinality(k.window_tokens)),
       ('the times of its window do not ascend', exists (
         select from (select w.at, lag(w.at) over (order by w.nth) as before from unnest(k.window_ats) with ordinality w(at, nth)) w
          where w.at <= w.before))
       ) as rule(problem, is_broken)
 where rule.is_broken
 order by k.quota_key_no limit :limit;

-- name: list_broken_budgets
-- Budgets whose counters contradict their reservations or ledgers. What is used may be more than the ledgers: usage can be reported without
-- an execution.
select d.budget_id, d.dimension, rule.problem
  from (select p.partition_key, p.budget_id, p.dimension, sum(p.used) as used, sum(p.reserved) as reserved, sum(p.spent) as spent,
               sum(p.kept) as kept
          from (select partition_key, budget_id, dimension, used, reserved, 0 as spent, 0 as kept from budget_usage
                union all
                select partition_key, budget_id, dimension, 0, 0, spent, 0 from budget_spend
                union all
                select budget_partition, budget_id, dimension, 0, 0, 0, amount from budget_reservation) p
         group by p.partition_key, p.budget_id, p.dimension) d
 cross join lateral (values
       (d.reserved || ' is reserved, but the reservations are ' || d.kept, d.reserved <> least(d.kept, :max_total::bigint)),
       (d.used || ' is used, but the ledgers have ' || d.spent, d.used < least(d.spent, :max_total)),
       ('it is counted without an account', not exists (
         select from budget_account a where a.partition_key = d.partition_key and a.budget_id = d.budget_id))
       ) as rule(problem, is_broken)
 where rule.is_broken
 order by d.budget_id, d.dimension limit :limit;

-- name: list_broken_reservations
-- Reservations that no lease can settle, and executions whose reservations would not return. The bit may be set without a reservation: one
-- that was settled or released leaves it until the lease ends.
select distinct r.partition_key, r.execution_id, rule.problem
  from budget_reservation r
  left join lateral (
       select e.execution_id, e.attached, e.ownership_state, e.lease_epoch from execution e
        where e.partition_key = r.partition_key and e.execution_id = r.execution_id limit 1) e on true
 cross join lateral (values
       ('budget_reservation: its execution does not exist', e.execution_id is null),
       ('budget_reservation: its lease has ended', e.ownership_state <> 'leased' or e.lease_epoch <> r.lease_epoch),
       ('attached: the reservation bit is missing', e.attached & 16 = 0)
       ) as rule(problem, is_broken)
 where rule.is_broken
 limit :limit;
