-- name: set_lane_state
-- Changes what a lane accepts; no row when there is no such lane.
update lane set state = :state::lane_state where lane_id = :lane_id returning lane_no;

-- name: list_lanes
-- The lanes behind a name, in the order of their bytes.
select lane_id, state, registered_at, registered_by from lane
 where :after::text is null or lane_id collate "C" > :after
 order by lane_id collate "C"
 limit :limit;
