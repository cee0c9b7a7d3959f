-- token, then F zone id rcpt token | P zone id rcpt token record
--           | S id created metadata doubtful chunks (chunk…) deliveries (zone rcpt record)…
local me = take()
teller = me
local changes, submits, messages = {}, {}, {}
local lost, sound, kinds = 0, 0, 0

local function standing(c)
  local record = call('HGET', deliveries_key(c.id), c.zone .. ' ' .. c.rcpt)
  if not record then return 'gone' end
  local owner = call('ZSCORE', CLAIMS, c.zone .. ' ' .. c.id .. ' ' .. c.rcpt)
  if owner == c.token or (c.token == '' and (not owner or owner == me)) then return 'sound' end
  -- The same change once more, because its first answer was lost.
  if not owner and record == c.record then return 'gone' end
  return 'lost'
end

while at < #ARGV do
  local kind = take()
  if kind == 'S' then
    submits[#submits + 1] = take_submit()
  else
    local c = {zone = take(), id = take(), rcpt = take(), token = take()}
    if kind == 'P' then c.record = take() end
    c.standing = standing(c)
    if c.standing == 'lost' then lost = lost + 1 elseif c.standing == 'sound' then sound = sound + 1 end
    if not messages[c.id] then messages[c.id] = true; kinds = kinds + 1 end
    changes[#changes + 1] = c
  end
end
-- Which report belongs to which message is not said: they must come alone to be told apart.
if lost > 0 and sound > 0 and #submits > 0 and kinds > 1 then return {'MIXED'} end

for _, c in ipairs(changes) do
  local record = c.standing == 'sound' and call('HGET', deliveries_key(c.id), c.zone .. ' ' .. c.rcpt)
  if record and not c.record then
    remove(c.zone, c.id, c.rcpt, record)
  elseif record then
    if call('ZREM', CLAIMS, c.zone .. ' ' .. c.id .. ' ' .. c.rcpt) == 1 then
      change(c.zone, c.id, c.rcpt, record, c.record, true)
      offer(c.zone, c.id, c.rcpt, c.record)
    else
      change(c.zone, c.id, c.rcpt, record, c.record, false)
    end
  end
end
for _, s in ipairs(submits) do
  local void = sound == 0 and (lost > 0 or (s.doubtful and #changes > 0))
  if not void then make(s, me) end
end
return {'OK', counted(), lost}
