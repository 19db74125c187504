-- ARGV: lease, ttl, skew, remember, sticky; then owner and payload of each key.
-- Replies, one a key: the fence of a first win, else {verdict, fence, lease left, attempts, answer,
-- takeover}. Verdicts: 0 won, 1 replay, 2 in flight, 3 conflict, 4 expired.
local lease_ms, ttl_ms, sticky = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[5] == '1'
local lease = now + lease_ms
local window = sticky and now + ttl_ms or lease + ttl_ms
local kept = math.max(lease, window)
local at = string.format('%.0f', kept + GRACE)
local replies, found = {}, nil
local head, owner_size, payload_size
for i = 1, #KEYS do
  local owner, payload = ARGV[2 * i + 4], ARGV[2 * i + 5]
  if #owner ~= owner_size or #payload ~= payload_size then
    owner_size, payload_size = #owner, #payload
    head = struct.pack('>Bi8i8i8i8I4I2I4', 80, us, lease, window, kept, 1, owner_size, payload_size)
  end
  local set = redis.pcall('SET', KEYS[i], head .. owner .. payload, 'NX', 'PXAT', at)
  if set and not set.err then
    replies[i] = us
  else
    replies[i] = false
    found = found or {}
    found[i] = set or true
  end
end
if not found then return replies end

-- record
local skew_ms, remember_ms = tonumber(ARGV[3]), tonumber(ARGV[4])
for i, refused in pairs(found) do
  local key, owner, payload, expires = KEYS[i], ARGV[2 * i + 4], ARGV[2 * i + 5], window
  local raw = redis.pcall('GET', key)
  if type(raw) == 'table' then return raw end
  if not raw then return refused end -- no memory for a new key
  local state, fence, held, ends, purge, attempts, holder, bound, rest = parse(raw, key)
  if not state then return damaged() end
  local same = bound == payload or bound == '' or payload == ''
  local verdict, mine, gone = 0, false, false
  if state == C then
    if now < ends + skew_ms then
      verdict = same and 1 or 3
    elseif remember_ms > 0 and now < purge then
      verdict = 4
    else
      gone = true
    end
  elseif state == P and holder == owner then
    mine, verdict = true, same and 0 or 3
  elseif state == P and now < held then
    verdict = same and 2 or 3
  elseif now >= ends then
    gone = true
  elseif not same and (state == P or sticky) then
    verdict = 3
  end
  if verdict ~= 0 then
    local left = state == P and math.max(held - now, 0) or 0
    replies[i] = {verdict, fence, left, attempts, verdict == 1 and rest, 0}
  elseif mine then
    if not sticky then ends = math.max(ends, window) end
    purge = math.max(ends, lease)
    redis.call('SET', key, pack(P, fence, lease, ends, purge, attempts, holder, bound, rest),
      'PXAT', until_ms(purge))
    replies[i] = {0, fence, lease_ms, attempts, false, 0}
  else
    if sticky and not gone and ends > now then
      expires = ends -- retries don't extend the window
      if bound ~= '' then payload = bound end
    end
    local inboxes = state == P and rest or ''
    fence, attempts = math.max(fence + 1, us), attempts + 1
    redis.call('SET', key,
      pack(P, fence, lease, expires, math.max(lease, expires), attempts, owner, payload, inboxes),
      'PXAT', until_ms(math.max(lease, expires)))
    replies[i] = {0, fence, lease_ms, attempts, false, state == P and 1 or 0}
  end
end
return replies
