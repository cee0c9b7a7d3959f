-- milliseconds (owner id)…: bodies that are still arriving.
local keep = take()
while at < #ARGV do
  local owner, key = take(), message_key(take())
  local whose = call('HMGET', key, '^', '#')
  if whose[1] == owner and not whose[2] then call('PEXPIRE', key, keep) end
end
return 'OK'
