-- KEYS leases  ARGV name, holder, fence
local lease = read_lease(KEYS[1], ARGV[1])
if not lease or lease.fence ~= ARGV[3] or lease.holder ~= ARGV[2] then
  return { 'lost' }
end
redis.call('HDEL', KEYS[1], ARGV[1])
return { 'released' }
