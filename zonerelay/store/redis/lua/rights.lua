-- which rights of the relay's user are missing: a text for each. Nothing is left of what is tried.
local missing = {}
local function try(command, ...)
  local answer = redis.pcall(command, ...)
  if type(answer) == 'table' and answer.err then
    missing[#missing + 1] = command .. ' ' .. ((...) or '') .. ': ' .. answer.err
  end
end

for _, kind in ipairs({'message:', 'deliveries:'}) do
  local key = P .. kind .. 'rights'
  try('HSET', key, 'field', 0)
  try('HSETNX', key, 'field', 0)
  try('HINCRBY', key, 'field', 1)
  for _, command in ipairs({'HGET', 'HMGET', 'HEXISTS', 'HSTRLEN'}) do try(command, key, 'field') end
  for _, command in ipairs({'HGETALL', 'HKEYS', 'HLEN', 'PTTL', 'TYPE', 'EXISTS', 'PERSIST'}) do try(command, key) end
  try('PEXPIRE', key, 1000)
  try('HDEL', key, 'field')
  try('UNLINK', key)
end
for _, kind in ipairs({'queue:', 'ready:', 'retry:', 'parked:rights:'}) do
  local key = P .. kind .. 'rights'
  try('ZADD', key, 0, 'member')
  try('ZCARD', key)
  try('ZSCORE', key, 'member')
  try('ZRANGE', key, 0, 0)
  try('ZCOUNT', key, 0, 0)
  try('ZRANGEBYSCORE', key, 0, 0)
  try('ZRANGEBYLEX', key, '-', '+')
  try('ZREM', key, 'member')
  try('UNLINK', key)
end
local parked = P .. 'parked:rights'
try('SADD', parked, 'member')
try('SISMEMBER', parked, 'member')
try('SMEMBERS', parked)
try('SREM', parked, 'member')
for _, kind in ipairs({'once:', 'limits:'}) do
  local key = P .. kind .. 'rights'
  try('SET', key, 0, 'PX', 1000)
  try('INCR', key)
  try('GET', key)
  try('DEL', key)
end
for _, key in ipairs({P .. 'claims', LEASES}) do
  try('ZREM', key, '')
  try('ZCARD', key)
end
for _, key in ipairs({P .. 'numbers', COUNTS}) do
  try('HDEL', key, '')
  try('HLEN', key)
end
for _, name in ipairs({'fence', 'mark', 'last-id', 'format', 'probe'}) do
  try('PERSIST', P .. name)
  try('GET', P .. name)
end
-- Relays that listen find no limit in it. The right to the channel of news shows when it is listened to.
try('PUBLISH', P .. 'limits', '')
try('SCAN', 0, 'COUNT', 1)
try('TIME')
return missing
