-- ARGV: an inbox for each key, or nothing. Leaves word with the record to be woken when its owner is
-- done. Replies with one digit a key: 1 if there is nothing to wait for.
local MOST = 64 * 8 -- inboxes of one key: beyond that waiters poll
local replies = {}
for i, key in ipairs(KEYS) do
  local inbox = ARGV[i]
  local raw = redis.pcall('GET', key)
  if type(raw) == 'table' then return raw end
  replies[i] = '1'
  if raw then
    local state, _, lease, _, _, _, _, _, rest = parse(raw, key)
    if not state then return damaged() end
    if state == P and now < lease then
      replies[i] = '0'
      local known = #inbox == 0 or #rest >= MOST
      for at = 1, #rest, 8 do
        known = known or string.sub(rest, at, at + 7) == inbox
      end
      if not known then redis.pcall('APPEND', key, inbox) end
    end
  end
end
return table.concat(replies)
