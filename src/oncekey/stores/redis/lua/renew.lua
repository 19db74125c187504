-- ARGV: lease, ttl, sticky; then owner and fence of each key.
-- Replies with one digit a key: 1 if the owner holds it.
local lease_ms, ttl_ms, sticky = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3] == '1'
local replies = {}
for i, key in ipairs(KEYS) do
  local owner, told = ARGV[2 * i + 2], tonumber(ARGV[2 * i + 3])
  local raw = redis.pcall('GET', key)
  if type(raw) == 'table' then return raw end
  replies[i] = '0'
  if raw then
    local state, fence, lease, expires, purge, attempts, holder, payload, rest = parse(raw, key)
    if not state then return damaged() end
    if state == P and holder == owner and fence == told then
      lease = now + lease_ms
      if not sticky then expires = math.max(expires, lease + ttl_ms) end
      purge = math.max(expires, lease)
      replace(key, until_ms(purge), pack(P, fence, lease, expires, purge, attempts, owner, payload, rest))
      replies[i] = '1'
    end
  end
end
return table.concat(replies)
