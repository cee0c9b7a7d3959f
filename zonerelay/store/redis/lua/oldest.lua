-- zone now limit: when the first delivery was created that is not held back by its sender.
local zone, now, limit = take(), tonumber(take()), tonumber(take())
for from = 0, limit, 100 do
  local members = call('ZRANGE', P .. 'queue:' .. zone, from, from + 99)
  for _, member in ipairs(members) do
    local id, rcpt = string.match(member, '^(%S+) (%S+)$')
    local record = call('HGET', deliveries_key(id), zone .. ' ' .. rcpt)
    local created = record and string.match(record, '^%S+ (%S+)')
    if created and tonumber(created) <= now then return created end
  end
  if #members < 100 then return false end
end
return false
