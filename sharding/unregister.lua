-- An owner has no memories any more that were told under these entities. Keys as in register.lua.
-- ARGV[1] '1' if the owner has none at all, [2] owner, [3] its tag, [4..] the entities, in the order of KEYS[4..].
if ARGV[1] == '1' then
  local left = {}
  for _, owner in ipairs(cjson.decode(redis.call('HGET', KEYS[3], ARGV[3]) or '[]')) do
    if owner ~= ARGV[2] then
      left[#left + 1] = owner
    end
  end
  if #left > 0 then
    redis.call('HSET', KEYS[3], ARGV[3], cjson.encode(left))
  else
    redis.call('HDEL', KEYS[3], ARGV[3])
  end
end
for i = 4, #ARGV do
  redis.call('SREM', KEYS[i], ARGV[2])
  if redis.call('SCARD', KEYS[i]) == 0 then
    redis.call('ZREM', KEYS[1], ARGV[i])
    redis.call('ZREM', KEYS[2], ARGV[i])
  end
end
return 1
