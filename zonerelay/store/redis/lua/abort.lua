-- owner id (beside…): an upload that was given up, or a commit whose answer was lost; not what others have taken
-- up. What stands beside a message goes with it, and stays with it.
local owner = take()

local function abort(id)
  local key = message_key(id)
  if call('HGET', key, '^') ~= owner then return 'GONE' end
  local found = call('HGETALL', deliveries_key(id))
  for i = 1, #found, 2 do
    local zone, rcpt = string.match(found[i], '^(%S+) (%S+)$')
    if call('ZSCORE', CLAIMS, zone .. ' ' .. id .. ' ' .. rcpt) then return 'CLAIMED' end
  end
  for i = 1, #found, 2 do
    local zone, rcpt = string.match(found[i], '^(%S+) (%S+)$')
    remove(zone, id, rcpt, found[i + 1])
  end
  call('UNLINK', key)
  return 'OK'
end

local said = abort(take())
if said ~= 'OK' then return {said} end
while at < #ARGV do abort(take()) end
return {'OK', counted()}
