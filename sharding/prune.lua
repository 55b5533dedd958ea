-- Forget shards whose heartbeat ran out, unless they sent one since they were found missing.
-- KEYS[1] members, KEYS[2..] heartbeats. ARGV the ids of those heartbeats, in the same order.
for i, id in ipairs(ARGV) do
  if redis.call('EXISTS', KEYS[i + 1]) == 0 then
    redis.call('SREM', KEYS[1], id)
  end
end
return 1
