-- KEYS leases  ARGV name, holder, fence
local lease = read_lease(KEYS[1], ARGV[1])
if not lease or lease.fence ~= ARGV[3] or lease.holder ~= ARGV[2] or lease.until_ms <= now_ms() then
  return { 'lost' }
end
write_lease(KEYS[1], ARGV[1], lease.fence, lease.ttl, lease.holder, lease.record)
return { 'renewed' }
