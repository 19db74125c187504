-- ARGV: the window of each key, in milliseconds. Replies with the count and what is left of the window.
-- A window begins with the first that is counted in it. The record is one that is done: its attempts
-- are the count.
local replies = {}
for i, key in ipairs(KEYS) do
  local raw = redis.pcall('GET', key)
  if type(raw) == 'table' then return raw end
  local count, ends, fence = 1, now + tonumber(ARGV[i]), us
  if raw then
    local state, held, _, expires, _, attempts = parse(raw, key)
    if not state then return damaged() end
    fence = math.max(held + 1, us)
    if state == C and now < expires then
      count, ends = math.min(attempts + 1, 4294967295), expires
    end
  end
  redis.call('SET', key, pack(C, fence, 0, ends, ends, count, '', '', ''), 'PXAT', until_ms(ends))
  replies[i] = {count, ends - now}
end
return replies
