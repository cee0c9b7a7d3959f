-- token zone limit budget now turn since skip…: fresh, due and passed-over ones take turns. With a message id
-- as `since`: fresh ones from that message on, nothing else.
local token, zone, limit, budget, now, turn, since =
  take(), take(), tonumber(take()), tonumber(take()), take(), tonumber(take()), take()
if is_over(token) then return {'LOST'} end
local skip = {}
while at < #ARGV do skip[take()] = true end
local READ = 50

local function source(key, read)
  local s = {key = key, rows = {}, pos = 0, read = read, offset = 0, taken = {}}
  function s.peek()
    if s.pos >= #s.rows and not s.over then
      s.rows, s.pos = s.read(s.offset), 0
      s.offset = s.offset + #s.rows
      s.over = #s.rows < READ
    end
    return s.rows[s.pos + 1]
  end
  return s
end
local ready, retry = P .. 'ready:' .. zone, P .. 'retry:' .. zone
local sources = {
  source(ready, function(from) return call('ZRANGE', ready, from, from + READ - 1) end),
  source(retry, function(from) return call('ZRANGEBYSCORE', retry, '-inf', now, 'LIMIT', from, READ) end),
}
if since ~= '' then
  sources = {source(ready, function(from)
    return call('ZRANGEBYLEX', ready, '[' .. since, '+', 'LIMIT', from, READ)
  end)}
end
local names = since == '' and call('SMEMBERS', P .. 'parked:' .. zone) or {}
table.sort(names)
for _, domain in ipairs(names) do
  if not skip[domain] then
    local key = parked_key(zone, domain)
    local s = source(key, function(from) return call('ZRANGE', key, from, from + READ - 1) end)
    s.domain = domain
    sources[#sources + 1] = s
  end
end

local function next_source()
  if since ~= '' then return sources[1].peek() and sources[1] end
  -- The third turn is that of all passed-over domains together.
  for step = 0, 2 do
    local which = (turn + step) % 3
    if which < 2 then
      if sources[which + 1].peek() then turn = (which + 1) % 3; return sources[which + 1] end
    else
      for i = 3, #sources do
        if sources[i].peek() then turn = 0; return sources[i] end
      end
    end
  end
end

local found, claims, parked, looked = {}, {}, {}, 0
while #found < 2 * limit and looked < budget do
  local s = next_source()
  if not s then break end
  local member = s.peek()
  s.pos = s.pos + 1
  s.taken[#s.taken + 1] = member
  looked = looked + 1
  local id, rcpt = string.match(member, '^(%S+) (%S+)$')
  local record = call('HGET', deliveries_key(id), zone .. ' ' .. rcpt)
  if record then
    local domain = string.match(record, '^%S+ %S+ (%S*) ')
    if skip[domain] then
      parked[domain] = parked[domain] or {}
      table.insert(parked[domain], 0)
      table.insert(parked[domain], member)
    else
      found[#found + 1] = member
      found[#found + 1] = record
      claims[#claims + 1] = token
      claims[#claims + 1] = zone .. ' ' .. member
    end
  end
end

local function each(command, key, items)
  for i = 1, #items, 1000 do call(command, key, unpack(items, i, math.min(i + 999, #items))) end
end
for _, s in ipairs(sources) do
  each('ZREM', s.key, s.taken)
  if s.domain and call('EXISTS', s.key) == 0 then call('SREM', P .. 'parked:' .. zone, s.domain) end
end
each('ZADD', CLAIMS, claims)
for domain, members in pairs(parked) do
  each('ZADD', parked_key(zone, domain), members)
  call('SADD', P .. 'parked:' .. zone, domain)
end
return {'OK', looked < budget and #found < 2 * limit and 1 or 0, turn, found}
