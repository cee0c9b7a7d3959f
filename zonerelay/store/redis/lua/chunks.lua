-- owner id milliseconds first (chunk…): part of a body whose message does not exist yet.
local owner, id, keep, first = take(), take(), take(), tonumber(take())
local key = message_key(id)
local whose = call('HMGET', key, '^', '#')
if whose[2] or (whose[1] and whose[1] ~= owner) then return 'TAKEN' end
if not whose[1] then
  if first > 1 then return 'GONE' end
  call('HSET', key, '^', owner)
end
for i = at + 1, #ARGV do call('HSET', key, first + i - at - 1, ARGV[i]) end
call('PEXPIRE', key, keep)
return 'OK'
