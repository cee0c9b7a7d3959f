-- id…: each message as it is now, with its deliveries and the places in the indexes where they stand.
local function fits(key, kind)
  local found = call('TYPE', key).ok
  return found == 'none' or found == kind
end

local function places(zone, id, rcpt, record)
  local member = id .. ' ' .. rcpt
  local domain = string.match(record, '^%S+ %S+ (%S*) ') or ''
  local token = call('ZSCORE', CLAIMS, zone .. ' ' .. member)
  local parked = call('ZSCORE', parked_key(zone, domain), member)
  -- In one string, because an answer of many parts takes its reader long.
  return table.concat({
    call('ZSCORE', P .. 'queue:' .. zone, member) and 1 or 0,
    token and (call('ZSCORE', LEASES, token) and 1 or 2) or 0,
    call('ZSCORE', P .. 'ready:' .. zone, member) and 1 or 0,
    call('ZSCORE', P .. 'retry:' .. zone, member) or '-',
    parked and 1 or 0,
    parked and call('SISMEMBER', P .. 'parked:' .. zone, domain) or 0,
  }, ' ')
end

local found = {}
while at < #ARGV do
  local id = take()
  local key, deliveries = message_key(id), deliveries_key(id)
  if fits(key, 'hash') and fits(deliveries, 'hash') then
    local sizes, rows = {}, {}
    for _, field in ipairs(call('HKEYS', key)) do
      if string.match(field, '^%d+$') then
        sizes[#sizes + 1] = field
        sizes[#sizes + 1] = call('HSTRLEN', key, field)
      end
    end
    local all = call('HGETALL', deliveries)
    for i = 1, #all, 2 do
      local zone, rcpt = string.match(all[i], '^(%S+) (%S+)$')
      rows[#rows + 1] = all[i]
      rows[#rows + 1] = all[i + 1]
      rows[#rows + 1] = zone and places(zone, id, rcpt, all[i + 1]) or ''
    end
    local head = call('HMGET', key, '#', '*')
    found[#found + 1] = {head[1], head[2], call('PTTL', key), sizes, rows}
  else
    found[#found + 1] = {}
  end
end
return found
