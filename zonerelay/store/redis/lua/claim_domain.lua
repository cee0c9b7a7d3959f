-- token zone domain limit: what claims passed over.
local token, zone, domain, limit = take(), take(), take(), tonumber(take())
if is_over(token) then return {'LOST'} end
local parked, found = parked_key(zone, domain), {}
for _, member in ipairs(call('ZRANGE', parked, 0, limit - 1)) do
  call('ZREM', parked, member)
  local id, rcpt = string.match(member, '^(%S+) (%S+)$')
  local record = call('HGET', deliveries_key(id), zone .. ' ' .. rcpt)
  if record then
    call('ZADD', CLAIMS, token, zone .. ' ' .. member)
    found[#found + 1] = member
    found[#found + 1] = record
  end
end
if call('EXISTS', parked) == 0 then call('SREM', P .. 'parked:' .. zone, domain) end
return {'OK', 1, 0, found}
