-- Hand a user from the owner of a placement to another shard.
-- KEYS[1] placement. ARGV shard, epoch, target, epoch + 1.
-- Returns the new epoch, or nil where the placement no longer stands.
local held = redis.call('HMGET', KEYS[1], 'shard', 'epoch')
if held[1] == ARGV[3] and held[2] == ARGV[4] then
  return tonumber(held[2]) -- this very switch, repeated after its answer was lost
end
if held[1] ~= ARGV[1] or held[2] ~= ARGV[2] then
  return false
end
redis.call('HSET', KEYS[1], 'shard', ARGV[3])
return redis.call('HINCRBY', KEYS[1], 'epoch', 1)
