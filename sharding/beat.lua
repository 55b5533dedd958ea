-- A shard's heartbeat, and whether heartbeats are whole again.
-- KEYS[1] members, KEYS[2] the shard's report, KEYS[3] beating, KEYS[4] settling. ARGV shard, report, TTL in ms.
-- Where nobody has beaten for a TTL, Redis was away (or everybody was): until another TTL has passed, a shard without a
-- heartbeat may just not have had its turn.
if redis.call('EXISTS', KEYS[3]) == 0 then
  redis.call('SET', KEYS[4], 1, 'PX', ARGV[3])
end
redis.call('SET', KEYS[3], 1, 'PX', ARGV[3])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
redis.call('SADD', KEYS[1], ARGV[1])
return 1
