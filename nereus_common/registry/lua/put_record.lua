-- KEYS records, head of the job  ARGV field, expected revision, text ('' to remove), fence ('' for none)
-- A record is "REVISION TEXT".
local seen = barred(KEYS[2], ARGV[4])
if seen then
  return { 'barred', seen }
end
local stored = redis.call('HGET', KEYS[1], ARGV[1])
local revision = stored and string.match(stored, '^%d+') or '0'
if revision ~= ARGV[2] then
  return { 'lost', revision }
end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
  return { 'removed', revision }
end
revision = exact(tonumber(revision) + 1)
redis.call('HSET', KEYS[1], ARGV[1], revision .. ' ' .. ARGV[3])
return { 'put', revision }
