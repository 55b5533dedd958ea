-- Keep what the owner says of a user: where their KV lies, how much it is, when they were last served. After fence.lua.
-- ARGV[3] tier, ARGV[4] bytes, ARGV[5] Unix time in seconds.
redis.call('HSET', KEYS[1], 'tier', ARGV[3], 'bytes', ARGV[4], 'used', ARGV[5])
return 1
