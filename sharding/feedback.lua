-- Keep what was said of a fact that still exists. After fence.lua.
-- KEYS[2] facts, KEYS[3] feedback. ARGV[3] fact id, ARGV[4] what was said, '' to take it back.
if ARGV[4] == '' then
  redis.call('HDEL', KEYS[3], ARGV[3])
elseif redis.call('HEXISTS', KEYS[2], ARGV[3]) == 1 then
  redis.call('HSET', KEYS[3], ARGV[3], ARGV[4])
end
return 1
