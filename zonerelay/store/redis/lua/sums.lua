-- zone…: of each ready, deferred, held as counted; then the members of queue, ready, retry and parked; last the
-- claims of all.
local found = {}
while at < #ARGV do
  local zone = take()
  local parked = 0
  for _, domain in ipairs(call('SMEMBERS', P .. 'parked:' .. zone)) do
    parked = parked + call('ZCARD', parked_key(zone, domain))
  end
  local counts = call('HMGET', COUNTS, 'r ' .. zone, 'd ' .. zone, 'h ' .. zone)
  found[#found + 1] = {
    counts[1] or '0', counts[2] or '0', counts[3] or '0', call('ZCARD', P .. 'queue:' .. zone),
    call('ZCARD', P .. 'ready:' .. zone), call('ZCARD', P .. 'retry:' .. zone), parked,
  }
end
found[#found + 1] = {call('ZCARD', CLAIMS)}
return found
