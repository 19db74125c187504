-- ARGV: ttl, skew, remember; then a token for each key. By the token a repetition knows its own mark.
-- Replies with 1 if all keys were new, else with one digit a key.
local expires = now + tonumber(ARGV[1])
local head = struct.pack('>Bi8', 77, expires)
local at = string.format('%.0f', expires + GRACE)
local found
for i, key in ipairs(KEYS) do
  local set = redis.pcall('SET', key, head .. ARGV[i + 3], 'NX', 'PXAT', at)
  if not set or set.err then
    found = found or {}
    found[i] = set or true
  end
end
if not found then return 1 end

-- record
local skew_ms, remember_ms = tonumber(ARGV[2]), tonumber(ARGV[3])
local replies = {}
for i, key in ipairs(KEYS) do
  replies[i] = '1'
  if found[i] then
    local token = ARGV[i + 3]
    local raw = redis.pcall('GET', key)
    if type(raw) == 'table' then return raw end
    if not raw then return found[i] end -- no memory for a new key
    local state, fence, lease, ends, purge, _, _, _, rest = parse(raw, key)
    if not state then return damaged() end
    local new
    if state == C then
      new = now >= ends + skew_ms and not (remember_ms > 0 and now < purge)
    else
      new = state == R or now >= lease
    end
    if not rest and string.sub(raw, -#token) == token then
      touch(key, ends)
    elseif new then
      local value = head .. token
      if fence + 1 > expires * 1000 - 1 then
        value = struct.pack('>Bi8i8', N, expires, fence + 1) .. token
      end
      redis.call('SET', key, value, 'PXAT', at)
      if state == P then wake(key, rest) end
    else
      replies[i] = '0'
    end
  end
end
return table.concat(replies)
