-- token (zone id rcpt old new goes)…: 1 done, 0 it is different now, 2 another relay has claimed it. New "": remove.
-- It goes to that zone's queue, "": it stays.
local me = take()
teller = me
local answer = {}
while at < #ARGV do
  local zone, id, rcpt, old, new, goes = take(), take(), take(), take(), take(), take()
  local owner = call('ZSCORE', CLAIMS, zone .. ' ' .. id .. ' ' .. rcpt)
  if owner and owner ~= me then
    answer[#answer + 1] = 2
  elseif call('HGET', deliveries_key(id), zone .. ' ' .. rcpt) ~= old then
    answer[#answer + 1] = 0
  else
    answer[#answer + 1] = 1
    if goes ~= '' then add(goes, id, rcpt, new) end
    if new == '' or goes ~= '' then
      remove(zone, id, rcpt, old)
    else
      change(zone, id, rcpt, old, new, owner)
    end
  end
end
return {'OK', counted(), answer}
