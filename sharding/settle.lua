-- A turn was distilled, or cannot be. After fence.lua.
-- KEYS[2] turns that are not distilled yet, KEYS[3] event, KEYS[4] turns by the facts that they tell.
-- ARGV[3] turn id, [4] event, [5] seconds that it can be asked for, [6..] ids of the facts that the turn tells.
redis.call('SREM', KEYS[2], ARGV[3])
redis.call('SET', KEYS[3], ARGV[4], 'EX', ARGV[5])
for i = 6, #ARGV do
  local told = redis.call('HGET', KEYS[4], ARGV[i])
  redis.call('HSET', KEYS[4], ARGV[i], (told and told .. ' ' or '') .. ARGV[3])
end
return 1
