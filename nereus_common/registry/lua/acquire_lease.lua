-- KEYS leases, epoch  ARGV name, holder, ttl_ms, record
local lease = read_lease(KEYS[1], ARGV[1])
local left = lease and lease.until_ms - now_ms() or 0
if left > 0 and lease.holder ~= ARGV[2] then
  return { 'held', lease.holder, exact(left) }
end
local fence = left > 0 and lease.fence or exact(redis.call('INCR', KEYS[2]))
write_lease(KEYS[1], ARGV[1], fence, ARGV[3], ARGV[2], ARGV[4])
return { 'acquired', fence }
