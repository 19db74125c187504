-- A record is one string, big-endian: kind, fence, lease_until, expires_at, purge_at, attempts, the
-- lengths of owner and payload, owner, payload, rest. Kinds: P pending (the rest is the inboxes of
-- waiters), C completed (the rest is the answer), R released. First-seen marks are shorter:
-- M is expires_at and a token, N is expires_at, fence and a token. S is a token alone, set by a plain
-- command: it ends a minute before Redis removes it.
-- Numbers are doubles: exact below 2^53, which microseconds reach in the year 2255.
local HEAD = '>Bi8i8i8i8I4I2I4'
local HEAD_SIZE = 43
local P, C, R, M, N, S = 80, 67, 82, 77, 78, 83
local FURTHEST = 9000000000000000

local function text(number)
  return string.format('%.0f', number) -- tostring() keeps 14 digits only
end

-- When the mark of a plain command ends. Time may pass between two looks: look until it does not.
local function ends_of(key)
  while true do
    local one, left, two = redis.call('TIME'), redis.call('PTTL', key), redis.call('TIME')
    local ms = one[1] * 1000 + math.floor(one[2] / 1000)
    if ms == two[1] * 1000 + math.floor(two[2] / 1000) then
      return ms + left - GRACE
    end
  end
end

-- state, fence, lease_until, expires_at, purge_at, attempts, owner, payload, rest
local function parse(raw, key)
  local kind = string.byte(raw)
  if kind == P or kind == C or kind == R then
    local _, fence, lease, expires, purge, attempts, owner, payload = struct.unpack(HEAD, raw)
    local start = HEAD_SIZE + owner
    return kind, fence, lease, expires, purge, attempts,
      string.sub(raw, HEAD_SIZE + 1, start),
      string.sub(raw, start + 1, start + payload),
      string.sub(raw, start + payload + 1)
  elseif kind == M or kind == S then
    local expires = kind == S and ends_of(key) or struct.unpack('>i8', raw, 2)
    return C, expires * 1000 - 1, 0, expires, expires, 1, '', '', false
  elseif kind == N then
    local expires, fence = struct.unpack('>i8i8', raw, 2)
    return C, fence, 0, expires, expires, 1, '', '', false
  end
end

local function pack(kind, fence, lease, expires, purge, attempts, owner, payload, rest)
  return struct.pack(HEAD, kind, fence, lease, expires, purge, attempts, #owner, #payload)
    .. owner .. payload .. rest
end

local function until_ms(purge)
  return text(math.min(math.max(purge, now) + GRACE, FURTHEST))
end

-- A repetition finds its work done: the reply was lost. It writes nevertheless, because WAIT covers
-- only what its own connection wrote (Valkey 9; Redis 6.2 is more generous).
local function touch(key, purge)
  redis.call('PEXPIREAT', key, until_ms(purge))
end

-- Nothing is sent unless somebody waits. That waiters may not be told must never fail an owner.
local function wake(key, inboxes)
  for at = 1, #inboxes, 8 do
    redis.pcall('PUBLISH', string.sub(key, 1, -33) .. 'inbox:' .. string.sub(inboxes, at, at + 7),
      string.sub(key, -32))
  end
end

local function damaged()
  return redis.error_reply('BADRECORD this key holds no record of oncekey')
end

