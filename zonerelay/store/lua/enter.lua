-- number: a new lease. The number stays the same if nobody else has taken it.
local wish, lease = tonumber(take()), take()
local now = milliseconds()
local token = call('INCR', P .. 'fence')
-- A server that has forgotten its past must not hand out a token twice.
if token < now then token = now; call('SET', P .. 'fence', token) end
token = string.format('%.0f', token)
for step = 0, 255 do
  local number = (wish + step) % 256
  local holder = call('HGET', P .. 'numbers', number)
  if not holder or not call('ZSCORE', LEASES, holder) then
    call('HSET', P .. 'numbers', number, token)
    call('ZADD', LEASES, now + lease, token)
    return {'OK', token, number}
  end
end
return {'FULL'}
