-- name: set_lane_state
-- Changes the state of a lane; no row if there is no such lane.
update lane set state = :state::lane_state where lane_id = :lane_id returning lane_no;

-- name: list_lanes
-- The lanes after a name, in byte order.
select lane_id, state, registered_at, registered_by from lane
 where :after::text is null or lane_id collate "C" > :after
 order by lane_id collate "C"
 limit :limit;
