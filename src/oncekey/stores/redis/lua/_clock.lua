-- The server's clock decides, in microseconds and milliseconds. One moment for all keys of a call.
local GRACE = 60000 -- ms that Redis keeps a record past its time: expired ones still raise the fence
local clock = redis.call('TIME')
local us = clock[1] * 1000000 + clock[2]
local now = math.floor(us / 1000)

-- Owners must be able to settle when memory is full. Redis looks at memory before the first write of
-- a script only, and PEXPIREAT is a write that it allows then.
local function replace(key, at, value)
  if redis.pcall('SET', key, value, 'PXAT', at).err then
    redis.call('PEXPIREAT', key, at)
    redis.call('SET', key, value, 'KEEPTTL')
  end
end

