-- compatible: yes
-- The queue and the outcome of executions that ended together, for counts.

-- Null in what an older version writes, whose executions are looked up to be counted. An entry with a queue counts for all of
-- its ids, so whatever takes an execution out of its end sets queue_no of its entry to null in the same transaction.
alter table retained add queue_no int, add terminal_outcome terminal_outcome;
create index retained_uncounted on retained (partition_key) where queue_no is null;
