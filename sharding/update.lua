-- Put a new version of a fact in the place of the one that stands, which goes to the history. After fence.lua.
-- KEYS[2] facts, KEYS[3] hashes, KEYS[4] embeddings, KEYS[5] history.
-- ARGV[3] fact id, [4] version that is replaced, [5] new record, [6] new text hash, [7] new embedding, '' to keep the
-- one that stands, [8] versions that the history keeps.
-- Returns 1; 0 if the fact is not (any more) as the caller believes; -1 if another fact has this text.
local standing = redis.call('HGET', KEYS[2], ARGV[3])
if standing == ARGV[5] then
  return 1 -- this very call, repeated after its answer was lost
end
local old = standing and cjson.decode(standing)
if not old or old.version ~= tonumber(ARGV[4]) then
  return 0
end
if old.text_hash ~= ARGV[6] then
  local known = redis.call('HGET', KEYS[3], ARGV[6])
  if known and known ~= ARGV[3] then
    return -1
  end
  redis.call('HDEL', KEYS[3], old.text_hash)
  redis.call('HSET', KEYS[3], ARGV[6], ARGV[3])
end
redis.call('HSET', KEYS[2], ARGV[3], ARGV[5])
redis.call('HSET', KEYS[5], ARGV[3] .. ':' .. old.version, standing)
redis.call('HDEL', KEYS[5], ARGV[3] .. ':' .. (old.version - tonumber(ARGV[8])))
if ARGV[7] ~= '' then
  redis.call('HSET', KEYS[4], ARGV[3], ARGV[7])
end
return 1
