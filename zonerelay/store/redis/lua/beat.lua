-- token lease now: the lease goes on; all counts; zones in which somebody may have something to do.
local token, lease, now = take(), take(), take()
if is_over(token) then return {'LOST'} end
call('ZADD', LEASES, milliseconds() + lease, token)
local counts, zones, busy = call('HGETALL', COUNTS), {}, {}
for i = 1, #counts, 2 do zones[string.sub(counts[i], 3)] = true end
for zone in pairs(zones) do
  if call('EXISTS', P .. 'ready:' .. zone, P .. 'parked:' .. zone) > 0
    or #call('ZRANGEBYSCORE', P .. 'retry:' .. zone, '-inf', now, 'LIMIT', 0, 1) > 0 then
    busy[#busy + 1] = zone
  end
end
return {'OK', counts, busy}
