-- token (zone id rcpt token)…: only what still hangs on that token.
teller = take()
while at < #ARGV do
  local member = take() .. ' ' .. take() .. ' ' .. take()
  if call('ZSCORE', CLAIMS, member) == take() then unclaim(member) end
end
return 'OK'
