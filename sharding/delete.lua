-- Remove facts and every trace of them: earlier versions, and the turns they were taken from. After fence.lua.
-- KEYS[2] facts, [3] order, [4] hashes, [5] embeddings, [6] history, [7] turns, [8] feedback,
-- [9] turns not distilled yet, [10] turns by the facts that they tell.
-- ARGV[3] versions that the history keeps, ARGV[4..] fact ids. Returns how many there were.
local count = 0
for i = 4, #ARGV do
  local id = ARGV[i]
  local record = redis.call('HGET', KEYS[2], id)
  if record then
    local fact = cjson.decode(record)
    redis.call('HDEL', KEYS[2], id)
    redis.call('ZREM', KEYS[3], id)
    redis.call('HDEL', KEYS[4], fact.text_hash)
    redis.call('HDEL', KEYS[5], id)
    for version = math.max(1, fact.version - tonumber(ARGV[3])), fact.version - 1 do
      redis.call('HDEL', KEYS[6], id .. ':' .. version)
    end
    for turn in string.gmatch((redis.call('HGET', KEYS[10], id) or '') .. ' ' .. fact.turn_id, '%S+') do
      redis.call('HDEL', KEYS[7], turn)
      redis.call('SREM', KEYS[9], turn)
    end
    redis.call('HDEL', KEYS[10], id)
    redis.call('HDEL', KEYS[8], id)
    count = count + 1
  end
end
return count
