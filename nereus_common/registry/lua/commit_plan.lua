-- KEYS plans, head of the job  ARGV expected epoch, plan, fence ('' for none)
local seen = barred(KEYS[2], ARGV[3])
if seen then
  return { 'barred', seen }
end
local epoch = redis.call('HGET', KEYS[2], 'epoch') or '0'
if epoch ~= ARGV[1] then
  return { 'stale', epoch }
end
epoch = exact(tonumber(epoch) + 1)
redis.call('HSET', KEYS[1], epoch, ARGV[2])
redis.call('HSET', KEYS[2], 'epoch', epoch)
return { 'committed', epoch }
