-- name: list_definitions
-- Where quota policies take the key and the weight of an execution from.
select p.quota_policy_id, p.key_from, p.weight_from
  from unnest(:partition_keys::smallint[], :quota_policy_ids::uuid[]) as i(partition_key, quota_policy_id)
 cross join lateral (
       select p.quota_policy_id, p.key_from, p.weight_from from quota_policy p
        where p.partition_key = i.partition_key and p.quota_policy_id = i.quota_policy_id limit 1) p;

-- name: list_scope_rules
-- The attached quotas that read a key or a weight from each execution, and the lanes that are fair by something read from it.
select a.scope_type, a.scope_id, p.quota_policy_id, p.key_from, p.weight_from
  from limit_attachment a
 cross join lateral (select k.partition_key from quota_key k where k.quota_key_no = a.quota_key_no limit 1) k
 cross join lateral (
       select p.quota_policy_id, p.key_from, p.weight_from from quota_policy p
        where p.partition_key = k.partition_key and p.quota_policy_id = a.limit_id limit 1) p
 where a.limit_type = 'quota' and a.scope_type <> 'flow' and (p.key_from is not null or p.weight_from is not null)
union all
select 'fair', lane_id, null, fair_by, null from lane where fair_by is not null;

-- name: list_inherited
-- The own limits of executions that are parents, and the key by which their lanes are fair; no row for one that does not exist.
select i.nth, c.quota_policy_id, c.key, k.budget_ids, k.fair_key
  from unnest(:partition_keys::smallint[], :execution_ids::uuid[]) with ordinality as i(partition_key, execution_id, nth)
 cross join lateral (
       select e.queue_no from execution e
        where e.partition_key = i.partition_key and e.execution_id = i.execution_id limit 1) e
  left join queue q on q.queue_no = e.queue_no
  left join admission_key k on k.admission_key_no = q.admission_key_no
  left join lateral (
       select c.quota_policy_id, c.key from quota_key c where c.quota_key_no = k.quota_key_nos[1] limit 1) c on true;
