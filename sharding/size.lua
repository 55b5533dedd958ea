-- Note how many bytes an owner's facts have, if its tenant has room for them. All keys are of one tenant's slot.
-- KEYS[1] bytes by owner, KEYS[2] their sum. ARGV[1] owner, [2] bytes, [3] the tenant's limit.
-- Returns {1 if noted, the sum that stands}. Growing beyond the limit is refused, shrinking never.
local before = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '0')
local sum = tonumber(redis.call('GET', KEYS[2]) or '0')
local grows = tonumber(ARGV[2]) - before
if grows > 0 and sum + grows > tonumber(ARGV[3]) then
  return { 0, sum }
end
if tonumber(ARGV[2]) > 0 then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
else
  redis.call('HDEL', KEYS[1], ARGV[1])
end
return { 1, redis.call('INCRBY', KEYS[2], grows) }
