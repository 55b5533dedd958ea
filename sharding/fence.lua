-- Opens every script that writes for a user: only the owner, under the epoch that stands, may go on.
-- KEYS[1] placement. ARGV[1] shard, ARGV[2] epoch. Returns nil to anyone else.
local held = redis.call('HMGET', KEYS[1], 'shard', 'epoch')
if held[1] ~= ARGV[1] or held[2] ~= ARGV[2] then
  return false
end
