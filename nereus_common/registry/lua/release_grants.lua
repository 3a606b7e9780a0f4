-- KEYS grants  ARGV unit, phase ('' for all)
local freed, all = 0, redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local unit, phase = string.match(all[i], '^%S+ (%S+) (%S+)$')
  if unit == ARGV[1] and (ARGV[2] == '' or phase == ARGV[2]) then
    freed = freed + tonumber(all[i + 1])
    redis.call('HDEL', KEYS[1], all[i])
  end
end
return { 'released', exact(freed) }
