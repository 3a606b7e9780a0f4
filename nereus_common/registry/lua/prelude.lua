-- Put before every script. One grant is the hash field "DEVICE UNIT PHASE" -> bytes.

-- Lua's own tostring keeps 14 digits; byte counts and milliseconds need all of them.
local function exact(number)
  return string.format('%.0f', number)
end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function granted_on(grants, device)
  local total, all = 0, redis.call('HGETALL', grants)
  for i = 1, #all, 2 do
    if string.match(all[i], '^%S+') == device then
      total = total + tonumber(all[i + 1])
    end
  end
  return total
end

-- The fence that bars this writer, or false. A higher fence is remembered, and bars those below it from now on.
local function barred(head, fence)
  if fence == '' then
    return false
  end
  local seen = tonumber(redis.call('HGET', head, 'fence') or '0')
  if tonumber(fence) < seen then
    return exact(seen)
  end
  redis.call('HSET', head, 'fence', fence)
  return false
end

-- A lease is "FENCE TTL_MS UNTIL_MS HOLDER RECORD".
local function read_lease(leases, name)
  local entry = redis.call('HGET', leases, name)
  if not entry then
    return nil
  end
  local fence, ttl, until_ms, holder, record = string.match(entry, '^(%d+) (%d+) (%d+) (%S+) (.*)$')
  return { fence = fence, ttl = ttl, until_ms = tonumber(until_ms), holder = holder, record = record }
end

local function write_lease(leases, name, fence, ttl, holder, record)
  local until_ms = exact(now_ms() + tonumber(ttl))
  redis.call('HSET', leases, name, table.concat({ fence, ttl, until_ms, holder, record }, ' '))
end
