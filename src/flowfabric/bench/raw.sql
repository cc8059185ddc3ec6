-- name: create_queue
-- A minimal queue whose callers choose the ids: an id, an order, a state, a priority and a payload.
create table queue (
       id       uuid primary key,
       sequence bigint generated always as identity,
       state    smallint not null default 0,
       priority integer not null default 0,
       payload  bytea not null);
create index queue_ready on queue (priority desc, sequence) where state = 0;

-- name: empty_queue
-- Deletes all rows.
truncate queue;

-- name: analyze_queue
-- Updates the planner statistics, as autovacuum would.
analyze queue;

-- name: insert_one
-- Inserts one ready row.
insert into queue (id, payload) values (:id, :payload);

-- name: insert_many
-- Inserts a ready row for each id.
insert into queue (id, payload) select i, p from unnest(:ids::uuid[], :payloads::bytea[]) as q(i, p);

-- name: claim_1
-- Claims the first ready row. The limit is a literal: a generic plan for a parameter would scan the table.
update queue set state = 1
 where id in (select id from queue
               where state = 0
               order by priority desc, sequence
               limit 1
                 for update skip locked)
returning id, payload;

-- name: claim_100
-- Claims the first hundred ready rows.
update queue set state = 1
 where id in (select id from queue
               where state = 0
               order by priority desc, sequence
               limit 100
                 for update skip locked)
returning id, payload;

-- name: complete_one
-- Completes a claimed row.
update queue set state = 2 where id = :id and state = 1;

-- name: complete_many
-- Completes claimed rows.
update queue set state = 2 where id = any(:ids::uuid[]) and state = 1;
