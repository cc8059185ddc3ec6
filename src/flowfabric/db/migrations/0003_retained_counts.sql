-- compatible: yes
-- The queues and the outcome of executions that ended together, for counts.

-- queue_no is the queue of all ids of an entry. Where they differ it is null, and queue_nos has the queue of each, in the order
-- of the ids: an entry for each queue would cost the statement that ends them more. An older version writes neither and
-- shortens the ids alone; executions of an entry that says too little are looked up to be counted. One that says enough counts
-- for all of its ids, so whatever takes an execution out of its end sets both columns of its entry to null.
alter table retained add queue_no int, add queue_nos int[], add terminal_outcome terminal_outcome;
create index retained_mixed on retained (partition_key) where queue_no is null;
