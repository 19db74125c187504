-- Replies with the record of each key as it is stored, or nothing. Lone marks don't hold the time
-- that they end: they are told like the others.
local replies = {}
for i, key in ipairs(KEYS) do
  local raw = redis.pcall('GET', key)
  if type(raw) == 'table' then return raw end
  if raw and string.byte(raw) == S then
    raw = struct.pack('>Bi8', M, ends_of(key))
  end
  replies[i] = raw
end
return replies
