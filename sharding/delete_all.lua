-- Remove all facts of a user. After fence.lua; the placement and the seq counter stay: they hold no text.
-- KEYS[2] facts, KEYS[3..] everything else that goes with them. Returns how many facts there were.
local count = redis.call('HLEN', KEYS[2])
for i = 2, #KEYS do
  redis.call('UNLINK', KEYS[i])
end
return count
