-- KEYS jobs  ARGV job
return redis.call('SADD', KEYS[1], ARGV[1])
