-- owner id created metadata stored new identity digest left (chunk…) deliveries (zone rcpt record)… (S submit)…:
-- the message exists from here, and what stands beside it.
local owner, id, created, metadata = take(), take(), take(), take()
local stored, new = tonumber(take()), tonumber(take())
local identity, digest, left = take(), take(), tonumber(take())
local once = P .. 'once:' .. identity
if identity ~= '' then
  local kept = call('GET', once)
  if kept then return {'KEPT', kept} end
end
local key = message_key(id)
local whose = call('HMGET', key, '^', '#')
if whose[2] or (whose[1] and whose[1] ~= owner) then return {'TAKEN'} end
if call('HLEN', key) ~= (stored > 0 and stored + 1 or 0) then return {'GONE'} end
teller = owner
put(id, owner, created, metadata)
for i = 1, new do call('HSET', key, stored + i, take()) end
for i = 1, tonumber(take()) do add(take(), id, take(), take()) end
while at < #ARGV do
  take()
  make(take_submit(), owner)
end
if identity ~= '' then call('SET', once, id .. ' ' .. digest, 'PX', left) end
return {'OK', counted()}
