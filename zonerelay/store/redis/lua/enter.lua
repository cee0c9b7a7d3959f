-- number lease version oldest: a new lease. The number stays the same if nobody else has taken it.
local wish, lease, version, oldest = tonumber(take()), take(), tonumber(take()), tonumber(take())
local now = milliseconds()

-- What is stored says its version, and the oldest that can work with it if that is another one.
local format = call('GET', P .. 'format')
local stored, needed = string.match(format or '0 0', '^(%d+) ?(%d*)$')
if not stored then return {'FORMAT', format} end
if needed == '' then needed = stored end
stored, needed = tonumber(stored), tonumber(needed)
if version < needed then return {'FORMAT', format} end
if stored < version then
  -- Whoever is alive may be as old as what is stored, and is not asked again.
  if oldest > stored and call('ZCOUNT', LEASES, now, '+inf') > 0 then return {'OLDER'} end
  oldest = math.max(oldest, needed)
  call('SET', P .. 'format', oldest == version and version or version .. ' ' .. oldest)
end
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
