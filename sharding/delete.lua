-- Remove one fact and every trace of it. After fence.lua.
-- KEYS[2] facts, KEYS[3] order, KEYS[4] hashes, KEYS[5] embeddings. ARGV[3] fact id. Returns 1, or 0 if unknown.
local record = redis.call('HGET', KEYS[2], ARGV[3])
if not record then
  return 0
end
redis.call('HDEL', KEYS[2], ARGV[3])
redis.call('ZREM', KEYS[3], ARGV[3])
redis.call('HDEL', KEYS[4], cjson.decode(record).text_hash)
redis.call('HDEL', KEYS[5], ARGV[3])
return 1
