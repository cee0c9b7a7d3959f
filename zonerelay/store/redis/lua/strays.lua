-- key zone (member…): those that are in this index and have no delivery; of `claims` the zone is "".
local key, zone = take(), take()
local strays = {}
while at < #ARGV do
  local member = take()
  local where, id, rcpt = zone, string.match(member, '^(%S+) (%S+)$')
  if zone == '' then where, id, rcpt = string.match(member, '^(%S+) (%S+) (%S+)$') end
  if call('ZSCORE', key, member)
    and not (id and call('HEXISTS', deliveries_key(id), where .. ' ' .. rcpt) == 1) then
    strays[#strays + 1] = member
  end
end
return strays
