-- Store the facts of one turn, each text once. After fence.lua.
-- KEYS[2] facts, KEYS[3] order, KEYS[4] hashes, KEYS[5] seq. ARGV[3..] triples: text hash, new id, record.
-- Returns for each text {1 if added else 0, seq, record that stands}.
local outcomes = {}
local told = {}
for i = 3, #ARGV, 3 do
  local hash, id, record = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local known = redis.call('HGET', KEYS[4], hash)
  if known then
    -- The same turn means this very call, repeated after its answer was lost: it did add, but for a text told twice.
    local stands = redis.call('HGET', KEYS[2], known)
    local mine = cjson.decode(stands).turn_id == cjson.decode(record).turn_id
    outcomes[#outcomes + 1] = {
      mine and not told[hash] and 1 or 0,
      tonumber(redis.call('ZSCORE', KEYS[3], known)),
      stands,
    }
  else
    local seq = redis.call('INCR', KEYS[5])
    redis.call('HSET', KEYS[2], id, record)
    redis.call('ZADD', KEYS[3], seq, id)
    redis.call('HSET', KEYS[4], hash, id)
    outcomes[#outcomes + 1] = { 1, seq, record }
  end
  told[hash] = true
end
return outcomes
