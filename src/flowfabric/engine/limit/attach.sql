-- name: lock_limited_flow
-- Locks a flow until the transaction ends; returns how many members it has, and no row if it does not exist.
select node_count from flow where partition_key = :partition_key and flow_id = :flow_id for update;

-- name: list_attachments
-- The limits of a scope, in the order in which they were attached.
select limit_type, limit_id from limit_attachment
 where scope_type = :scope_type and scope_id = :scope_id
 order by attached_at, limit_id;

-- name: list_quotas_of_kinds
-- The quota policies that are attached to these execution kinds.
select scope_id, limit_id from limit_attachment
 where scope_type = 'kind' and scope_id = any(:kinds::text[]) and limit_type = 'quota';

-- name: insert_attachment
-- Attaches a limit to a scope, after those that are attached.
insert into limit_attachment (scope_type, scope_id, limit_type, limit_id, attached_at, quota_key_no)
values (:scope_type, :scope_id, :limit_type, :limit_id, ff_now(), :quota_key_no);

-- name: take_attachment
-- Detaches a limit from a scope.
delete from limit_attachment
 where scope_type = :scope_type and scope_id = :scope_id and limit_type = :limit_type and limit_id = :limit_id;

-- name: list_limited_queues
-- The queues of a lane, a namespace or a kind, and their lanes.
select q.queue_no, l.lane_id
  from queue q join lane l using (lane_no) join namespace n using (namespace_no) join kind k using (kind_no)
 where case :scope_type::text when 'lane' then l.lane_id when 'namespace' then n.namespace when 'kind' then k.execution_kind end
       = :scope_id::text;
