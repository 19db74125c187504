-- ARGV: payload, answer and expires_at of each key. Puts a completed record over whatever is there.
for i, key in ipairs(KEYS) do
  local payload, answer, expires = ARGV[3 * i - 2], ARGV[3 * i - 1], tonumber(ARGV[3 * i])
  local raw = redis.pcall('GET', key)
  if type(raw) == 'table' then return raw end
  local fence, inboxes = now * 1000, ''
  if raw then
    local state, old, _, _, _, _, _, _, rest = parse(raw, key)
    if not state then return damaged() end
    fence = math.max(old + 1, fence)
    if state == P then inboxes = rest end
  end
  redis.call('SET', key, pack(C, fence, 0, expires, expires, 1, '', payload, answer),
    'PXAT', until_ms(expires))
  wake(key, inboxes)
end
return string.rep('1', #KEYS)
