-- fragment: entry
-- The columns of a flow in a list.
f.flow_id, f.flow_kind, n.namespace, f.created_at, f.public_flow_state, f.derived_state

-- name: list_flows
-- The newest flows before a position, and whether each has the wanted tag. Each pair of states of each namespace has its own range of
-- the index: a recursive skip scan finds the pairs, and only those whose newest flow may be on the page are read.
with recursive used as (
  select n.namespace_no, ''::text as public_flow_state, ''::text as derived_state, n.namespace_no as last_no
    from namespace n where n.namespace = any(:namespaces::text[])
  union all
  select -1, '', '', 2147483647 where :namespaces is null
  union all
  select f.namespace_no, f.public_flow_state, f.derived_state, u.last_no
    from used u
   cross join lateral (
         select f.namespace_no, f.public_flow_state, f.derived_state from flow f
          where (f.namespace_no, f.public_flow_state, f.derived_state) > (u.namespace_no, u.public_flow_state, u.derived_state)
            and f.namespace_no <= u.last_no
          order by f.namespace_no, f.public_flow_state, f.derived_state limit 1) f
),
newest as materialized (
  select u.namespace_no, u.public_flow_state, u.derived_state, f.created_at
    from used u
   cross join lateral (
         select f.created_at from flow f
          where f.namespace_no = u.namespace_no and f.public_flow_state = u.public_flow_state and f.derived_state = u.derived_state
            and (f.created_at, f.flow_id) < (:before_at::bigint, :before_id::uuid) and f.created_at >= :created_from::bigint
          order by f.created_at desc, f.flow_id desc limit 1) f
   where u.public_flow_state <> ''
     and (:public_states::text[] is null or exists (
          select from unnest(:public_states, :derived_states::text[]) as w(public_state, derived_state)
           where w.public_state = u.public_flow_state and w.derived_state = u.derived_state))
   order by f.created_at desc limit :depth
),
page as materialized (
  select f.*
    from newest u
   cross join lateral (
         select f.* from flow f
          where f.namespace_no = u.namespace_no and f.public_flow_state = u.public_flow_state and f.derived_state = u.derived_state
            and (f.created_at, f.flow_id) < (:before_at, :before_id)
            and f.created_at >= greatest(:created_from, (select min(w.created_at) from newest w having count(*) >= :depth))
          order by f.created_at desc, f.flow_id desc limit :depth) f
   order by f.created_at desc, f.flow_id desc limit :depth
)
select
-- include: entry
, :tag_key::text is null or (
    select t.value = :tag_value::text from flow_tag t
     where t.partition_key = f.partition_key and t.flow_id = f.flow_id and t.key collate "C" = :tag_key
  ) is true as is_match
  from page f
  left join lateral (select n.namespace from namespace n where n.namespace_no = f.namespace_no limit 1) n on true
 order by f.created_at desc, f.flow_id desc;

-- name: list_tagged_flows
-- The newest flows with a tag before a position, and whether all flows with the tag were looked at, of which at most :cap are.
with candidate as materialized (
  select t.partition_key, t.flow_id, t.value from flow_tag t
   where t.key = :tag_key::text and left(t.value, 128) = left(:tag_value::text, 128) limit :cap
)
select whole.is_whole, found.*
  from (select count(*) < :cap as is_whole from candidate) whole
  left join lateral (
       select
       -- include: entry
         from (select f.*
                 from candidate t
                cross join lateral (
                      select f.* from flow f where f.partition_key = t.partition_key and f.flow_id = t.flow_id limit 1) f
                where whole.is_whole and t.value = :tag_value
                  and (f.created_at, f.flow_id) < (:before_at::bigint, :before_id::uuid) and f.created_at >= :created_from::bigint
                  and (:public_states::text[] is null or exists (
                       select from unnest(:public_states, :derived_states::text[]) as w(public_state, derived_state)
                        where w.public_state = f.public_flow_state and w.derived_state = f.derived_state))
                  and (:namespaces::text[] is null or f.namespace_no in (
                       select n.namespace_no from namespace n where n.namespace = any(:namespaces)))
                order by f.created_at desc, f.flow_id desc limit :depth) f
         left join lateral (select n.namespace from namespace n where n.namespace_no = f.namespace_no limit 1) n on true
        order by f.created_at desc, f.flow_id desc) found on true;
