-- name: create_queue
-- The least a queue needs whose callers name their work: an id, what is ready, in which order, with which payload.
create table queue (
       id       uuid primary key,
       sequence bigint generated always as identity,
       state    smallint not null default 0,
       priority integer not null default 0,
       payload  bytea not null);
create index queue_ready on queue (priority desc, sequence) where state = 0;

-- name: empty_queue
-- The queue as it was created.
truncate queue;

-- name: analyze_queue
-- Statistics, as autovacuum would have taken them.
analyze queue;

-- name: insert_one
-- One ready row.
insert into queue (id, payload) values (:id, :payload);

-- name: insert_many
-- A ready row for each id.
insert into queue (id, payload) select i, p from unnest(:ids::uuid[], :payloads::bytea[]) as q(i, p);

-- name: claim_1
-- The best ready row, now running. The limit is a literal: a generic plan for a parameter would scan the table.
update queue set state = 1
 where id in (select id from queue
               where state = 0
               order by priority desc, sequence
               limit 1
                 for update skip locked)
returning id, payload;

-- name: claim_100
-- The best hundred ready rows, now running.
update queue set state = 1
 where id in (select id from queue
               where state = 0
               order by priority desc, sequence
               limit 100
                 for update skip locked)
returning id, payload;

-- name: complete_one
-- A running row, now ended.
update queue set state = 2 where id = :id and state = 1;

-- name: complete_many
-- Running rows, now ended.
update queue set state = 2 where id = any(:ids::uuid[]) and state = 1;
