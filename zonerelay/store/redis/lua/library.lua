-- What all scripts share. The keys are described in scripts.py.

local P = KEYS[1]
local call = redis.call
local CLAIMS, LEASES, COUNTS = P .. 'claims', P .. 'leases', P .. 'counts'
local at = 0
local function take() at = at + 1; return ARGV[at] end
local function message_key(id) return P .. 'message:' .. id end
local function deliveries_key(id) return P .. 'deliveries:' .. id end
local function parked_key(zone, domain) return P .. 'parked:' .. zone .. ':' .. domain end

local function milliseconds()
  local t = call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- A lease that is being given up counts as 0: it can neither be renewed nor claimed with.
local function is_over(token)
  local ends = call('ZSCORE', LEASES, token)
  return not ends or ends == '0'
end

local moved = {}
local function move(zone, record, by)
  local due = string.match(record, '^%S+')
  local field = (due == 'h' and 'h ' or due == '0' and 'r ' or 'd ') .. zone
  moved[field] = (moved[field] or 0) + by
end

-- What has moved is counted once; the answer: zone, ready, deferred, held of every zone concerned.
local function counted()
  local zones, answer = {}, {}
  for field, by in pairs(moved) do
    if by ~= 0 and call('HINCRBY', COUNTS, field, by) <= 0 then call('HDEL', COUNTS, field) end
    zones[string.sub(field, 3)] = true
  end
  for zone in pairs(zones) do
    local now = call('HMGET', COUNTS, 'r ' .. zone, 'd ' .. zone, 'h ' .. zone)
    answer[#answer + 1] = zone
    for i = 1, 3 do answer[#answer + 1] = now[i] or '0' end
  end
  return answer
end

-- Only the first of several is news: who hears of it claims until nothing is left.
local teller = ''
local function offer(zone, id, rcpt, record)
  local due = string.match(record, '^%S+')
  local member = id .. ' ' .. rcpt
  if due == '0' then
    local ready = P .. 'ready:' .. zone
    if call('EXISTS', ready) == 0 then call('PUBLISH', P .. 'news', teller .. ' ' .. zone) end
    call('ZADD', ready, 0, member)
  elseif due ~= 'h' then
    call('ZADD', P .. 'retry:' .. zone, due, member)
  end
end

local function withdraw(zone, id, rcpt, record)
  local due, domain = string.match(record, '^(%S+) %S+ (%S*) ')
  if due == 'h' then return end
  local member = id .. ' ' .. rcpt
  if call('ZREM', P .. (due == '0' and 'ready:' or 'retry:') .. zone, member) == 1 then return end
  local parked = parked_key(zone, domain)
  if call('ZREM', parked, member) == 1 and call('EXISTS', parked) == 0 then
    call('SREM', P .. 'parked:' .. zone, domain)
  end
end

local function add(zone, id, rcpt, record)
  if call('HSETNX', deliveries_key(id), zone .. ' ' .. rcpt, record) == 0 then return end
  call('ZADD', P .. 'queue:' .. zone, 0, id .. ' ' .. rcpt)
  offer(zone, id, rcpt, record)
  move(zone, record, 1)
end

-- The last delivery takes the message with it.
local function remove(zone, id, rcpt, record)
  local deliveries = deliveries_key(id)
  call('HDEL', deliveries, zone .. ' ' .. rcpt)
  call('ZREM', P .. 'queue:' .. zone, id .. ' ' .. rcpt)
  if call('ZREM', CLAIMS, zone .. ' ' .. id .. ' ' .. rcpt) == 0 then withdraw(zone, id, rcpt, record) end
  move(zone, record, -1)
  if call('EXISTS', deliveries) == 0 then call('UNLINK', message_key(id)) end
end

local function change(zone, id, rcpt, old, new, claimed)
  call('HSET', deliveries_key(id), zone .. ' ' .. rcpt, new)
  if not claimed then
    withdraw(zone, id, rcpt, old)
    offer(zone, id, rcpt, new)
  end
  move(zone, old, -1)
  move(zone, new, 1)
end

local function unclaim(member)
  call('ZREM', CLAIMS, member)
  local zone, id, rcpt = string.match(member, '^(%S+) (%S+) (%S+)$')
  local record = call('HGET', deliveries_key(id), zone .. ' ' .. rcpt)
  if record then offer(zone, id, rcpt, record) end
end

local function put(id, owner, created, metadata)
  local key = message_key(id)
  call('HSET', key, '^', owner, '#', created, '*', metadata)
  call('PERSIST', key)
  local last = call('GET', P .. 'last-id')
  if not last or last < id then call('SET', P .. 'last-id', id) end
end

-- A message of our own: id created metadata doubtful chunks (chunk…) deliveries (zone rcpt record)…
local function take_submit()
  local s = {id = take(), created = take(), metadata = take(), doubtful = take() == '1', chunks = {}, rows = {}}
  for i = 1, tonumber(take()) do s.chunks[i] = take() end
  for i = 1, tonumber(take()) do s.rows[i] = {take(), take(), take()} end
  return s
end

local function make(s, owner)
  if call('HEXISTS', message_key(s.id), '#') == 1 then return end
  put(s.id, owner, s.created, s.metadata)
  for i, chunk in ipairs(s.chunks) do call('HSET', message_key(s.id), i, chunk) end
  for _, row in ipairs(s.rows) do add(row[1], s.id, row[2], row[3]) end
end
