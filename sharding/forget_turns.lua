-- Forget turns, distilled or not. After fence.lua.
-- KEYS[2] turns, KEYS[3] turns that are not distilled yet. ARGV[3..] turn ids.
for i = 3, #ARGV do
  redis.call('HDEL', KEYS[2], ARGV[i])
  redis.call('SREM', KEYS[3], ARGV[i])
end
return 1
