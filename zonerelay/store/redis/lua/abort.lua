-- owner id: an upload that was given up, or a commit whose answer was lost; not what others have taken up.
local owner, id = take(), take()
local key, deliveries = message_key(id), deliveries_key(id)
if call('HGET', key, '^') ~= owner then return {'GONE'} end
local found = call('HGETALL', deliveries)
for i = 1, #found, 2 do
  local zone, rcpt = string.match(found[i], '^(%S+) (%S+)$')
  if call('ZSCORE', CLAIMS, zone .. ' ' .. id .. ' ' .. rcpt) then return {'CLAIMED'} end
end
for i = 1, #found, 2 do
  local zone, rcpt = string.match(found[i], '^(%S+) (%S+)$')
  remove(zone, id, rcpt, found[i + 1])
end
call('UNLINK', key)
return {'OK', counted()}
