-- limit longest: gives back claims of leases that have ended; how many, 0 when all of that is done.
local limit, longest = take(), milliseconds() + take()
-- No lease is as long (in milliseconds): one that is was written before the server's clock was set back, and
-- would keep a dead relay's claims for as long as that was ahead.
for _, token in ipairs(call('ZRANGEBYSCORE', LEASES, '(' .. longest, '+inf')) do call('ZADD', LEASES, longest, token) end
local over = call('ZRANGEBYSCORE', LEASES, '-inf', milliseconds(), 'LIMIT', 0, 1)[1]
if not over then return {0} end
call('ZADD', LEASES, 0, over)
local members = call('ZRANGEBYSCORE', CLAIMS, over, over, 'LIMIT', 0, limit)
for _, member in ipairs(members) do unclaim(member) end
if #members < tonumber(limit) then call('ZREM', LEASES, over) end
return {#members + 1, over}
