-- Take a user who has no owner, or whose owner is the one expected (and known to be gone).
-- KEYS[1] placement. ARGV shard, expected shard ('' for none), expected epoch.
-- Returns {shard, epoch}: the placement that stands afterwards, whoever won.
local held = redis.call('HMGET', KEYS[1], 'shard', 'epoch')
if held[1] and not (held[1] == ARGV[2] and held[2] == ARGV[3]) then
  return { held[1], tonumber(held[2]) }
end
redis.call('HSET', KEYS[1], 'shard', ARGV[1])
return { ARGV[1], redis.call('HINCRBY', KEYS[1], 'epoch', 1) }
