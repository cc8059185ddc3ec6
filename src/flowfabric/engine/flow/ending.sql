-- name: list_ended_flows
-- One row for each given flow in which every member has ended, with the states that its status is derived from, and for each that does
-- not exist, with nulls. An open flow without members has not ended.
select i.nth, f.public_flow_state, f.derived_state
  from unnest(:partition_keys::smallint[], :flow_ids::uuid[]) with ordinality as i(partition_key, flow_id, nth)
  left join lateral (
       select f.flow_id, f.live_count, f.node_count, f.public_flow_state, f.derived_state from flow f
        where f.partition_key = i.partition_key and f.flow_id = i.flow_id limit 1) f on true
 where f.flow_id is null or (f.live_count = 0 and (f.node_count > 0 or f.public_flow_state = 'cancelled'));
