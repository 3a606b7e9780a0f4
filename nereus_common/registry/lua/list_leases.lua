-- KEYS leases
local now, reply = now_ms(), {}
for _, name in ipairs(redis.call('HKEYS', KEYS[1])) do
  local lease = read_lease(KEYS[1], name)
  reply[#reply + 1] = { name, lease.holder, lease.fence, lease.ttl, exact(lease.until_ms - now), lease.record }
end
return reply
