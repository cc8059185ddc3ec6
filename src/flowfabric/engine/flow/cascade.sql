-- name: read_entry
-- The entry of an event, if the cascade has not settled it.
select partition_key from cascade_entry where event_id = :event_id;

-- name: list_old_entries
-- Entries that were queued after :since and more than :older_than_ms ago, the oldest first.
select c.partition_key, c.event_id from cascade_entry c
 where c.queued_at > :since::bigint and c.queued_at <= (select ff_now()) - :older_than_ms::bigint
 order by c.queued_at limit :limit;

-- name: list_entries_of_flow
-- The entries of one flow, the oldest first.
select c.partition_key, c.event_id from cascade_entry c
 where c.partition_key = :partition_key and c.flow_id = :flow_id order by c.event_id limit :limit;
