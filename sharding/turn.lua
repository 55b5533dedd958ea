-- Keep a turn that facts are to be distilled from, and the event that tells how far that is. After fence.lua.
-- KEYS[2] turns, KEYS[3] turns that are not distilled yet, KEYS[4] event.
-- ARGV[3] turn id, [4] turn, [5] event, [6] seconds that the event can be asked for.
redis.call('HSET', KEYS[2], ARGV[3], ARGV[4])
redis.call('SADD', KEYS[3], ARGV[3])
redis.call('SET', KEYS[4], ARGV[5], 'EX', ARGV[6])
return 1
