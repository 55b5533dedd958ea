-- An owner has memories told under these entities. All keys are of one tenant's slot.
-- KEYS[1] first seen, [2] last seen, [3] tags, [4..] owners of each entity.
-- ARGV[1] milliseconds since 1970, [2] owner, [3] its tag, [4..] the entities, in the order of KEYS[4..].
local owners = cjson.decode(redis.call('HGET', KEYS[3], ARGV[3]) or '[]')
local known = false
for _, owner in ipairs(owners) do
  known = known or owner == ARGV[2]
end
if not known then
  owners[#owners + 1] = ARGV[2]
  redis.call('HSET', KEYS[3], ARGV[3], cjson.encode(owners))
end
for i = 4, #ARGV do
  redis.call('SADD', KEYS[i], ARGV[2])
  redis.call('ZADD', KEYS[1], 'NX', ARGV[1], ARGV[i])
  redis.call('ZADD', KEYS[2], ARGV[1], ARGV[i])
end
return 1
