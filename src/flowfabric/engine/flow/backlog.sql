-- name: lock_backlog
-- Locks what the cancellation of a flow owes until the transaction ends, waiting for it; no row if it owes nothing.
select b.flow_id from cancel_backlog b where b.partition_key = :partition_key and b.flow_id = :flow_id for update;

-- name: list_owed_members
-- Those of the given members that a cancelled flow still owes.
select m.execution_id from cancel_backlog_member m
 where m.partition_key = :partition_key and m.flow_id = :flow_id and m.execution_id = any(:execution_ids::uuid[]);

-- name: take_members
-- Deletes members that a cancelled flow no longer owes, and the header of its backlog if no other member is left.
with taken as (
  delete from cancel_backlog_member m
   where m.partition_key = :partition_key and m.flow_id = :flow_id and m.execution_id = any(:execution_ids::uuid[])
)
delete from cancel_backlog b
 where b.partition_key = :partition_key and b.flow_id = :flow_id
   and not exists (
       select from cancel_backlog_member m
        where m.partition_key = :partition_key and m.flow_id = :flow_id and m.execution_id <> all(:execution_ids));

-- name: take_backlog
-- Deletes the backlog of a flow that does not exist any more.
with taken as (
  delete from cancel_backlog_member m where m.partition_key = :partition_key and m.flow_id = :flow_id
)
delete from cancel_backlog b where b.partition_key = :partition_key and b.flow_id = :flow_id;

-- name: list_due_backlogs
-- The backlogs whose grace has passed, the oldest first, each with members except :skipped in ascending order. A backlog of which
-- all members are skipped is left out, so that it does not use up the limit. With `exists` the planner would hash all members.
with clock as materialized (select ff_now() as now),
due as materialized (
  select b.*
    from clock c
   cross join lateral (
         select b.partition_key, b.flow_id, b.reason, b.grace_until from cancel_backlog b
          where b.grace_until <= c.now
            and coalesce(
                (select true from cancel_backlog_member m
                  where m.partition_key = b.partition_key and m.flow_id = b.flow_id and m.execution_id <> all(:skipped::uuid[])
                  limit 1),
                (select false from cancel_backlog_member m
                  where m.partition_key = b.partition_key and m.flow_id = b.flow_id limit 1),
                true)
          order by b.grace_until limit :flow_limit) b
)
select d.partition_key, d.flow_id, d.reason, m.execution_ids,
       (select true from flow f where f.partition_key = d.partition_key and f.flow_id = d.flow_id limit 1) is not null as has_flow
  from due d
 cross join lateral (
       select coalesce(array_agg(m.execution_id), '{}') as execution_ids
         from (select m.execution_id from cancel_backlog_member m
                where m.partition_key = d.partition_key and m.flow_id = d.flow_id and m.execution_id <> all(:skipped)
                order by m.execution_id limit :member_limit) m) m
 order by d.grace_until;
