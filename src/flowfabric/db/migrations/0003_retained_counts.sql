-- compatible: yes
-- The queues and the outcome of executions that ended together, for counts.

-- queue_no is the queue of all ids of an entry. If they have several queues, it is null and queue_nos has the queue of each id,
-- in the same order: one entry per queue would make the statement that ends them slower. An older version sets neither column
-- and removes ids without changing queue_nos; the executions of such an entry are looked up to be counted. Any other entry
-- counts all of its ids, so a statement that moves an execution out of its terminal state must set both columns to null.
alter table retained add queue_no int, add queue_nos int[], add terminal_outcome terminal_outcome;
create index retained_mixed on retained (partition_key) where queue_no is null;
