-- Keep embeddings of facts that still exist. After fence.lua.
-- KEYS[2] facts, KEYS[3] embeddings. ARGV[3..] pairs: fact id, float32 bytes. Returns how many were kept.
local kept = 0
for i = 3, #ARGV, 2 do
  if redis.call('HEXISTS', KEYS[2], ARGV[i]) == 1 then
    redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 1])
    kept = kept + 1
  end
end
return kept
