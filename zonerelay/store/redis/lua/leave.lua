-- token number limit: the relay stops. True while there is more to give back.
local token, number, limit = take(), take(), take()
local members = call('ZRANGEBYSCORE', CLAIMS, token, token, 'LIMIT', 0, limit)
for _, member in ipairs(members) do unclaim(member) end
if #members == tonumber(limit) then return 1 end
call('ZREM', LEASES, token)
if call('HGET', P .. 'numbers', number) == token then call('HDEL', P .. 'numbers', number) end
return 0
