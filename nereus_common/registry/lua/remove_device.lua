-- KEYS devices, grants  ARGV device
local granted = granted_on(KEYS[2], ARGV[1])
if granted > 0 then
  return { 'in use', exact(granted) }
end
redis.call('HDEL', KEYS[1], ARGV[1])
return { 'removed' }
