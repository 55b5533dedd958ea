-- Clear the owner and keep the epoch, so that the next claim is newer than everything before it.
-- KEYS[1] placement. ARGV shard, epoch. Does nothing where the placement no longer stands.
local held = redis.call('HMGET', KEYS[1], 'shard', 'epoch')
if held[1] == ARGV[1] and held[2] == ARGV[2] then
  redis.call('HDEL', KEYS[1], 'shard')
end
return 1
