-- id created (field…): puts the deliveries of a message where they belong, but for these fields, which leave;
-- created "": the message leaves with all of it.
local id, created = take(), take()
local key, deliveries = message_key(id), deliveries_key(id)
local leaves = {}
while at < #ARGV do leaves[take()] = true end
local all = call('HGETALL', deliveries)
for i = 1, #all, 2 do
  local zone, rcpt = string.match(all[i], '^(%S+) (%S+)$')
  local goes = created == '' or leaves[all[i]]
  if goes then call('HDEL', deliveries, all[i]) end
  if zone then
    local member = id .. ' ' .. rcpt
    call('ZREM', CLAIMS, zone .. ' ' .. member)
    call('ZREM', P .. 'ready:' .. zone, member)
    call('ZREM', P .. 'retry:' .. zone, member)
    for _, domain in ipairs(call('SMEMBERS', P .. 'parked:' .. zone)) do
      call('ZREM', parked_key(zone, domain), member)
      if call('EXISTS', parked_key(zone, domain)) == 0 then call('SREM', P .. 'parked:' .. zone, domain) end
    end
    if goes then
      call('ZREM', P .. 'queue:' .. zone, member)
    else
      call('ZADD', P .. 'queue:' .. zone, 0, member)
      offer(zone, id, rcpt, all[i + 1])
    end
  end
end
if created == '' then
  call('UNLINK', key, deliveries)
else
  call('HSET', key, '#', created)
  call('PERSIST', key)
end
return 'OK'
