-- name: read_coverage
-- How many queues a worker may serve (queues), and how many of them match the kinds and the namespace of its claim (wanted).
select count(*) filter (where (:kind_nos::int[] is null or q.kind_no in (select unnest(:kind_nos)))
                          and (:namespace_no::int is null or q.namespace_no = :namespace_no)) as wanted, count(*) as queues
  from lane l
  join route r using (lane_no)
  join capability_set c using (capability_set_no)
  join queue q on q.lane_no = l.lane_no and q.route_no = r.route_no
 where l.lane_id = any(:lanes::text[]) and c.required <@ :capabilities::text[];
