-- fragment: group
-- The group g of an entry p: whether it is flagged, null if it does not exist, and the siblings that are still to be cancelled.
left join lateral (
     select g.cancel_siblings_pending_flag as is_flagged, g.cancel_siblings_pending_members[1:(:members)::int] as members,
            g.cancel_siblings_reason as reason
       from edge_group g
      where g.partition_key = p.partition_key and g.flow_id = p.flow_id and g.downstream_id = p.downstream_id limit 1) g on true

-- name: read_pending_group
-- The entry of a group whose siblings are to be cancelled, with its first :members siblings.
select p.partition_key, p.flow_id, p.downstream_id, g.is_flagged, g.members, g.reason
  from (select p.* from pending_cancel_group p
         where p.partition_key = :partition_key and p.flow_id = :flow_id and p.downstream_id = :downstream_id) p
  -- include: group
;

-- name: list_pending_groups
-- The groups whose siblings are to be cancelled, the oldest first, except those skipped.
select p.partition_key, p.flow_id, p.downstream_id, g.is_flagged, g.members, g.reason
  from (select p.* from pending_cancel_group p
         where p.downstream_id <> all(:skipped::uuid[])
         order by p.enqueued_at limit :limit) p
  -- include: group
 order by p.enqueued_at;

-- name: list_pending_siblings
-- Those of the given siblings that are still to be cancelled for a group.
select m.execution_id
  from edge_group g
 cross join lateral unnest(g.cancel_siblings_pending_members) as m(execution_id)
 where g.partition_key = :partition_key and g.flow_id = :flow_id and g.downstream_id = :downstream_id
   and m.execution_id = any(:execution_ids::uuid[]);

-- name: take_siblings
-- Removes siblings that need no cancellation any more from the list of a group, unless another session has locked the group; with the
-- last one, the flag of the group is cleared and its entry deleted. A sibling that lives stays: a replay has taken it from the list, and
-- the group was decided again. Returns what became of the entry: taken; gone, if it was before; pending, if siblings are left; locked.
with held as materialized (
  select g.cancel_siblings_pending_members as members from edge_group g
   where g.partition_key = :partition_key and g.flow_id = :flow_id and g.downstream_id = :downstream_id
     for update skip locked
),
judged as materialized (
  select array(
           select m.execution_id from unnest(h.members) with ordinality as m(execution_id, nth)
            where m.execution_id not in (select unnest(:handled::uuid[])) or exists (
                  select from execution e
                   where e.partition_key = :partition_key and e.execution_id = m.execution_id and e.lifecycle_phase <> 'terminal' offset 0)
            order by m.nth) as members
    from held h
),
changed as (
  update edge_group g
     set cancel_siblings_pending_flag = j.members <> '{}', cancel_siblings_pending_members = nullif(j.members, '{}')
    from judged j
   where g.partition_key = :partition_key and g.flow_id = :flow_id and g.downstream_id = :downstream_id and g.cancel_siblings_pending_flag
),
deleted as (
  delete from pending_cancel_group p
   where p.partition_key = :partition_key and p.flow_id = :flow_id and p.downstream_id = :downstream_id
     and (exists (select from judged where members = '{}') or not exists (
           select from edge_group g
            where g.partition_key = :partition_key and g.flow_id = :flow_id and g.downstream_id = :downstream_id))
  returning 1
)
select case
         when exists (select from deleted) then 'taken'
         when not exists (
           select from pending_cancel_group p
            where p.partition_key = :partition_key and p.flow_id = :flow_id and p.downstream_id = :downstream_id) then 'gone'
         when exists (select from judged where members <> '{}') then 'pending'
         else 'locked' end as became;

-- name: take_finished_group
-- Deletes the entry of a group that needs no cancellation any more and clears its flag, and returns what was done: nothing if the
-- group is locked elsewhere, has a live sibling, or has no entry.
with entry as materialized (
  select p.* from pending_cancel_group p
   where p.partition_key = :partition_key and p.flow_id = :flow_id and p.downstream_id = :downstream_id
     for update skip locked
),
held as materialized (
  select g.* from entry p
   cross join lateral (
         select g.cancel_siblings_pending_flag as is_flagged, g.cancel_siblings_pending_members as members from edge_group g
          where g.partition_key = p.partition_key and g.flow_id = p.flow_id and g.downstream_id = p.downstream_id
            for update skip locked) g
),
judged as materialized (
  select case
           when not exists (select from entry) then 'no_op'
           when not exists (
             select from edge_group g
              where g.partition_key = :partition_key and g.flow_id = :flow_id and g.downstream_id = :downstream_id) then 'sremmed_stale'
           when not exists (select from held) then 'no_op'
           when exists (select from held where not is_flagged) then 'sremmed_stale'
           when exists (
             select from held h
              cross join lateral unnest(h.members) as m(execution_id)
              cross join lateral (
                    select e.lifecycle_phase from execution e
                     where e.partition_key = :partition_key and e.execution_id = m.execution_id limit 1) e
              where e.lifecycle_phase <> 'terminal') then 'no_op'
           else 'completed_drain' end as action
),
cleared as (
  update edge_group g set cancel_siblings_pending_flag = false, cancel_siblings_pending_members = null
    from judged j
   where j.action = 'completed_drain'
     and g.partition_key = :partition_key and g.flow_id = :flow_id and g.downstream_id = :downstream_id
),
deleted as (
  delete from pending_cancel_group p using judged j
   where j.action <> 'no_op'
     and p.partition_key = :partition_key and p.flow_id = :flow_id and p.downstream_id = :downstream_id
)
select action from judged;
