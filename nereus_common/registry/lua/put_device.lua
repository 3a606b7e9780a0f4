-- KEYS devices, grants  ARGV device, memory, kind
local granted = granted_on(KEYS[2], ARGV[1])
if granted > tonumber(ARGV[2]) then
  return { 'in use', exact(granted) }
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' ' .. ARGV[3])
return { 'put' }
