-- compatible: yes
-- Limits: budgets, quotas, what they are attached to, and the fairness of lanes.

-- A budget's definition. Its counters are separate, so that usage of a budget that is not defined yet is counted too.
create table budget (
  partition_key     smallint not null,
  budget_id         uuid     not null,
  scope_type        text     not null,
  scope_id          text     not null,
  enforcement_mode  text     not null,
  on_hard_limit     text     not null,
  on_soft_limit     text     not null,
  reset_interval_ms bigint   not null,
  created_at        bigint   not null,
  constraint budget_pkey primary key (partition_key, budget_id)
);

-- The limits of a budget's dimensions; 0 is no limit.
create table budget_limit (
  partition_key smallint not null,
  budget_id     uuid     not null,
  dimension     text     not null,
  hard_limit    bigint   not null,
  soft_limit    bigint   not null,
  constraint budget_limit_pkey primary key (partition_key, budget_id, dimension)
) with (fillfactor = 50);

-- The counters of a budget. Every statement that changes what a budget has counted locks this row first.
create table budget_account (
  partition_key     smallint not null,
  budget_id         uuid     not null,
  breach_count      bigint   not null default 0,
  soft_breach_count bigint   not null default 0,
  reset_count       bigint   not null default 0,
  last_reset_at     bigint,
  last_breach_at    bigint,
  last_breach_dim   text,
  next_reset_at     bigint,
  constraint budget_account_pkey primary key (partition_key, budget_id)
) with (fillfactor = 50);
create index budget_account_due on budget_account (next_reset_at) where next_reset_at is not null;

create table budget_usage (
  partition_key smallint not null,
  budget_id     uuid     not null,
  dimension     text     not null,
  used          bigint   not null default 0,
  reserved      bigint   not null default 0,
  constraint budget_usage_pkey primary key (partition_key, budget_id, dimension),
  constraint budget_usage_is_not_negative check (used >= 0 and reserved >= 0)
) with (fillfactor = 50);

-- What one execution has spent of a budget.
create table budget_spend (
  partition_key       smallint not null,
  budget_id           uuid     not null,
  execution_partition smallint not null,
  execution_id        uuid     not null,
  dimension           text     not null,
  spent               bigint   not null,
  constraint budget_spend_pkey primary key (partition_key, budget_id, execution_id, dimension)
) with (fillfactor = 80);
create index budget_spend_of_execution on budget_spend (execution_partition, execution_id);

-- What a run has reserved of a budget and not settled yet. It returns to the budget when the lease ends.
create table budget_reservation (
  partition_key    smallint not null,
  execution_id     uuid     not null,
  budget_partition smallint not null,
  budget_id        uuid     not null,
  reservation_key  text     not null,
  dimension        text     not null,
  amount           bigint   not null,
  lease_epoch      bigint   not null,
  reserved_at      bigint   not null,
  constraint budget_reservation_pkey primary key (partition_key, execution_id, budget_id, reservation_key, dimension)
);
create index budget_reservation_of_budget on budget_reservation (budget_partition, budget_id);

alter type keyed_operation add value 'spend';
alter type keyed_operation add value 'settle';

create table quota_policy (
  partition_key           smallint not null,
  quota_policy_id         uuid     not null,
  window_seconds          bigint   not null,
  max_requests_per_window bigint   not null,
  max_concurrent          bigint   not null,
  jitter_ms               bigint   not null,
  -- Where the key of an execution comes from, 'tag:<key>' or 'payload:<JSON pointer>'; null: one key for all.
  key_from                text,
  -- Where its weight comes from, how many tokens of the rate it takes; null: 1.
  weight_from             text,
  created_at              bigint   not null,
  constraint quota_policy_pkey primary key (partition_key, quota_policy_id)
);
create index quota_policy_id on quota_policy (quota_policy_id);

-- What one key of a quota has admitted; kept for quotas that are not defined, too. Every admission locks this row.
create table quota_key (
  quota_key_no    integer  not null generated always as identity,
  partition_key   smallint not null,
  quota_policy_id uuid     not null,
  key             text     not null,
  -- How many slots were ever taken; those in use are this number less what slot_return has.
  taken           bigint   not null default 0,
  -- The tokens of the rate taken in the last window, oldest first: when, and how many.
  window_ats      bigint[] not null default '{}',
  window_tokens   bigint[] not null default '{}',
  constraint quota_key_pkey primary key (partition_key, quota_key_no),
  constraint quota_key_name unique (partition_key, quota_policy_id, key)
) with (fillfactor = 50);
create index quota_key_number on quota_key (quota_key_no);

-- How many slots were ever given back. A row per shard, so that the ends of leases rarely wait for each other, and never for a claim.
create table slot_return (
  quota_key_no integer  not null,
  shard        smallint not null,
  returned     bigint   not null,
  constraint slot_return_pkey primary key (quota_key_no, shard)
) with (fillfactor = 50);

-- The guard of an admitted execution: until then it takes no second token, unless it was released. has_slot: it holds a slot without a
-- grant or a lease. A released guard is kept for its time: its token moves with the next admission.
create table quota_admission (
  quota_key_no  integer  not null,
  partition_key smallint not null,
  execution_id  uuid     not null,
  admitted_at   bigint   not null,
  guard_until   bigint   not null,
  has_slot      boolean  not null,
  is_released   boolean  not null default false,
  -- When its token was entered into the window; null: it took none.
  token_at      bigint,
  -- How many tokens it took then.
  tokens        bigint   not null default 1,
  constraint quota_admission_pkey primary key (quota_key_no, execution_id)
);
create index quota_admission_due on quota_admission (guard_until);
create index quota_admission_execution on quota_admission (execution_id);
create index quota_admission_slot on quota_admission (quota_key_no, guard_until) where has_slot;

-- The budgets and quotas of a lane, a namespace, an execution kind or a flow.
create table limit_attachment (
  scope_type  text   not null,
  scope_id    text   not null,
  limit_type  text   not null,
  limit_id    uuid   not null,
  attached_at bigint not null,
  -- The key of executions that have none, of a quota that is attached to a lane, a namespace or a kind.
  quota_key_no integer,
  constraint limit_attachment_pkey primary key (scope_type, scope_id, limit_type, limit_id),
  constraint limit_attachment_scope check (scope_type in ('lane', 'namespace', 'kind', 'flow')),
  constraint limit_attachment_type check (limit_type in ('budget', 'quota'))
);

-- The limits that executions were created with, and the key by which their lane is fair. The number 0 means none.
create table admission_key (
  admission_key_no integer not null generated always as identity,
  quota_key_nos    integer[] not null,
  -- The keys by the quotas that were attached to the lane, the namespace and the kind at the time; they count only as long as those are.
  attached_key_nos integer[] not null,
  budget_ids       uuid[]    not null,
  fair_key         text      not null,
  digest           bytea     not null,
  constraint admission_key_pkey primary key (admission_key_no),
  constraint admission_key_digest unique (digest)
);

-- All limits of a queue: of its admission key, and those attached to its lane, namespace and kind.
alter table queue
  add column quota_key_nos integer[] not null default '{}',
  add column budget_ids    uuid[]    not null default '{}',
  add column fair_key      text      not null default '';
create index queue_of_quota_key on queue using gin (quota_key_nos);
create index queue_of_budget on queue using gin (budget_ids);

-- Null: the lane is not fair, or does not age.
alter table lane
  add column fair_by      text,
  add column fair_weights jsonb,
  add column ageing_ms    bigint;

-- The quota keys of which the execution holds a slot (null or empty: none), and how many tokens of a rate it takes (null: 1).
alter table execution
  add column slot_keys    integer[],
  add column quota_weight bigint;
-- For reading by budget without its partition, as admission does.
create index budget_limit_of_budget on budget_limit (budget_id);

-- Whether its execution holds slots for it, which return when it expires.
alter table claim_grant add column has_slots boolean not null default false;
create index claim_grant_slots_due on claim_grant (expires_at) where has_slots;

-- The capabilities of a set that workers can offer, without those that only keep claims without admission away.
create function ff_required(text[]) returns text[] language sql immutable parallel safe as
  $$ select array(select c from unnest($1) with ordinality as u(c, nth) where c not like 'limited claims%' order by nth) $$;

create index queue_limited on queue (queue_no) where quota_key_nos <> '{}' or budget_ids <> '{}';

-- What keys of quotas have admitted by a time. The slots of expired guards are free. No limits if the policy is not defined.
create function ff_key_use(integer[], bigint)
  returns table (quota_key_no integer, quota_policy_id uuid, key text, key_from text, window_seconds bigint, max_requests_per_window bigint,
                 max_concurrent bigint, jitter_ms bigint, used bigint, tokens bigint, window_ats bigint[], window_tokens bigint[])
  language sql stable parallel safe as $$
  select k.quota_key_no, k.quota_policy_id, k.key, p.key_from, p.window_seconds, p.max_requests_per_window, p.max_concurrent, p.jitter_ms,
         greatest(k.taken - t.returned - g.expired, 0), w.tokens, k.window_ats, k.window_tokens
    from unnest($1) as n(quota_key_no)
   cross join lateral (select k.* from quota_key k where k.quota_key_no = n.quota_key_no limit 1) k
    left join lateral (
         select p.* from quota_policy p where p.partition_key = k.partition_key and p.quota_policy_id = k.quota_policy_id limit 1) p on true
   cross join lateral (
         select coalesce(sum(t.returned), 0)::bigint as returned from slot_return t where t.quota_key_no = k.quota_key_no) t
   cross join lateral (
         select count(*) as expired from quota_admission g where g.quota_key_no = k.quota_key_no and g.has_slot and g.guard_until <= $2) g
   cross join lateral (
         select coalesce(sum(w.tokens), 0)::bigint as tokens from unnest(k.window_ats, k.window_tokens) as w(at, tokens)
          where w.at > $2 - 1000 * coalesce(nullif(p.window_seconds, 0), 60)) w $$;

-- The dimensions of budgets whose hard limit is used up.
create function ff_spent_dimensions(uuid[])
  returns table (nth bigint, partition_key smallint, budget_id uuid, dimension text, used bigint, hard_limit bigint)
  language sql stable parallel safe as $$
  select b.nth, l.partition_key, l.budget_id, l.dimension, l.used, l.hard_limit
    from unnest($1) with ordinality as b(budget_id, nth)
   cross join lateral (
         select l.partition_key, l.budget_id, l.dimension, u.used, l.hard_limit
           from budget_limit l
          cross join lateral (
                select u.used from budget_usage u
                 where u.partition_key = l.partition_key and u.budget_id = l.budget_id and u.dimension = l.dimension limit 1) u
          where l.budget_id = b.budget_id and l.hard_limit > 0 and u.used >= l.hard_limit
         offset 0) l $$;

-- Whether the limits of a queue, its quota keys and its budgets, admit nothing at a time.
create function ff_full(integer[], uuid[], bigint) returns table (is_full boolean) language sql stable parallel safe as $$
  select exists (
           select from ff_key_use($1, $3) u
            where (u.max_concurrent > 0 and u.used >= u.max_concurrent)
               or (u.max_requests_per_window > 0 and u.tokens >= u.max_requests_per_window))
         or exists (select from ff_spent_dimensions($2)) $$;

-- The queues with entries whose limits admit nothing at a time.
create function ff_full_queues(bigint) returns table (queue_no integer) language sql stable parallel safe as $$
  select q.queue_no
    from (select q.queue_no, q.quota_key_nos, q.budget_ids from queue q
           where (q.quota_key_nos <> '{}' or q.budget_ids <> '{}')
             and (select true from ready r where r.queue_no = q.queue_no limit 1)
          offset 0) q
   cross join lateral ff_full(q.quota_key_nos, q.budget_ids, $1) f
   where f.is_full $$;
