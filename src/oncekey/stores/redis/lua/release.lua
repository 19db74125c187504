-- ARGV: 1 if this may be a repetition; then owner and fence (or nothing) of each key.
-- Replies with one digit a key: 1 if the owner held it. The record stays: fences must keep rising.
-- A mark is released by its token: it could not be confirmed, and the next to come is the first.
local again = ARGV[1] == '1'
local replies = {}
for i, key in ipairs(KEYS) do
  local owner, told = ARGV[2 * i], tonumber(ARGV[2 * i + 1])
  local raw = redis.pcall('GET', key)
  if type(raw) == 'table' then return raw end
  replies[i] = '0'
  if raw then
    local state, fence, _, expires, purge, attempts, holder, payload, rest = parse(raw, key)
    if not state then return damaged() end
    local mark = not rest and #owner > 0 and string.sub(raw, -#owner) == owner
    if mark or (holder == owner and (not told or fence == told)) then
      if mark or state == P then
        replace(key, until_ms(purge), pack(R, fence, now, expires, purge, attempts, owner, payload, ''))
        wake(key, rest or '')
        replies[i] = '1'
      elseif state == R and again then
        touch(key, purge)
        replies[i] = '1'
      end
    end
  end
end
return table.concat(replies)
