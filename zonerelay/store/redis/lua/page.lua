-- zone from end limit: a page of the queue with its records.
local zone, from, to, limit = take(), take(), take(), take()
local members = call('ZRANGEBYLEX', P .. 'queue:' .. zone, from, to, 'LIMIT', 0, limit)
local found = {}
for i, member in ipairs(members) do
  local id, rcpt = string.match(member, '^(%S+) (%S+)$')
  found[2 * i - 1] = member
  found[2 * i] = call('HGET', deliveries_key(id), zone .. ' ' .. rcpt) or ''
end
return found
