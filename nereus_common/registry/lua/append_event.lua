-- KEYS events, head of the job  ARGV events kept, kind, time, payload
-- Revisions are counted, not taken from the clock: dense, so that a reader sees a gap, and never going back.
local revision = exact(redis.call('HINCRBY', KEYS[2], 'events', 1))
redis.call('XADD', KEYS[1], 'MAXLEN', ARGV[1], revision .. '-0', 'kind', ARGV[2], 'time', ARGV[3], 'payload', ARGV[4])
return { 'appended', revision }
