-- ARGV: ttl, skew, remember, sticky; then owner, fence (as the record has it) and answer of each key.
-- Replies with 1 if all owners held their keys, else with one digit a key.
local ttl_ms, kept_ms = tonumber(ARGV[1]), tonumber(ARGV[2]) + tonumber(ARGV[3])
local sticky = ARGV[4] == '1'
local purge = now + ttl_ms + kept_ms
local dates = struct.pack('>i8i8i8', 0, now + ttl_ms, purge)
local at = string.format('%.0f', purge + GRACE)
local rest
for i = 1, #KEYS do
  local owner, fence = ARGV[3 * i + 2], ARGV[3 * i + 3]
  local raw = redis.pcall('GET', KEYS[i])
  if not sticky and raw and not raw.err and string.byte(raw) == 80
    and string.sub(raw, 2, 9) == fence and string.sub(raw, 44, 43 + #owner) == owner then
    local size, payload = struct.unpack('>I2I4', raw, 38)
    if size == #owner and #raw == 43 + size + payload then
      replace(KEYS[i], at, 'C' .. fence .. dates .. string.sub(raw, 34) .. ARGV[3 * i + 4])
      raw = nil
    end
  end
  if raw ~= nil then
    rest = rest or {}
    rest[i] = true
  end
end
if not rest then return 1 end

-- record
local replies = {}
for i, key in ipairs(KEYS) do
  replies[i] = '1'
  if rest[i] then
    replies[i] = '0'
    local raw = redis.pcall('GET', key)
    if type(raw) == 'table' then return raw end
    if raw then
      local state, fence, _, expires, ends, attempts, holder, payload, inboxes = parse(raw, key)
      if not state then return damaged() end
      if holder == ARGV[3 * i + 2] and fence == struct.unpack('>i8', ARGV[3 * i + 3]) then
        if state == P then
          if not sticky then expires = now + ttl_ms end
          ends = expires + kept_ms
          replace(key, until_ms(ends),
            pack(C, fence, 0, expires, ends, attempts, holder, payload, ARGV[3 * i + 4]))
          wake(key, inboxes)
          replies[i] = '1'
        elseif state == C then
          touch(key, ends)
          replies[i] = '1'
        end
      end
    end
  end
end
return table.concat(replies)
