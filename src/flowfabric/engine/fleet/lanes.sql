-- name: set_lane_state
-- Changes the state of a lane; returns no row if there is no such lane.
update lane set state = :state::lane_state where lane_id = :lane_id returning lane_no;

-- name: list_lanes
-- The first :limit lanes in the byte order of their ids, or the next ones after the id :after.
select lane_id, state, registered_at, registered_by, fair_by, fair_weights, ageing_ms from lane
 where :after::text is null or lane_id collate "C" > :after
 order by lane_id collate "C"
 limit :limit;
