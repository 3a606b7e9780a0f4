-- KEYS devices, grants  ARGV unit, phase, then device, bytes for each device
-- The sums are taken afresh from the grants: a running total beside them could drift from them.
local owner = ARGV[1] .. ' ' .. ARGV[2]
local taken, former = {}, {}
local all = redis.call('HGETALL', KEYS[2])
for i = 1, #all, 2 do
  local device, holder = string.match(all[i], '^(%S+) (.+)$')
  if holder == owner then
    former[#former + 1] = all[i]
  else
    taken[device] = (taken[device] or 0) + tonumber(all[i + 1])
  end
end
for i = 3, #ARGV, 2 do
  local stored = redis.call('HGET', KEYS[1], ARGV[i])
  if not stored then
    return { 'unknown', ARGV[i] }
  end
  local memory = tonumber(string.match(stored, '^%d+'))
  local free = memory - (taken[ARGV[i]] or 0)
  if tonumber(ARGV[i + 1]) > free then
    return { 'full', ARGV[i], ARGV[i + 1], exact(free), exact(memory) }
  end
end
for _, field in ipairs(former) do
  redis.call('HDEL', KEYS[2], field)
end
for i = 3, #ARGV, 2 do
  redis.call('HSET', KEYS[2], ARGV[i] .. ' ' .. owner, ARGV[i + 1])
end
return { 'granted' }
