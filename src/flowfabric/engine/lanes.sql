-- name: set_lane_state
-- Changes what a lane accepts; no row when there is no such lane.
update lane set state = :state::lane_state where lane_id = :lane_id returning lane_no;
