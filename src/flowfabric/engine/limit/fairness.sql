-- name: set_lane_fairness
-- Changes by what a lane is fair, and returns its routes, a null if it has none; no row if there is no such lane.
with changed as (
  update lane set fair_by = :fair_by::text, fair_weights = :fair_weights::text::jsonb, ageing_ms = :ageing_ms::bigint
   where lane_id = :lane_id
  returning lane_no
)
select r.route_no from changed c left join route r using (lane_no);
