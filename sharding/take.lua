-- Count something against what one minute has room for.
-- KEYS[1] the minute's count. ARGV[1] how much, [2] limit, [3] seconds that the count is kept.
-- Returns {1 if there was room (also with nothing to count: whether there is any left), what has been counted}.
local used = tonumber(redis.call('GET', KEYS[1]) or '0')
local cost, limit = tonumber(ARGV[1]), tonumber(ARGV[2])
if used + math.max(cost, 1) > limit then
  return { 0, used }
end
if cost > 0 then
  used = redis.call('INCRBY', KEYS[1], cost)
  redis.call('EXPIRE', KEYS[1], ARGV[3])
end
return { 1, used }
