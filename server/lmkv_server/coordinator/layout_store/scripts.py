"""Lua scripts that Valkey runs atomically. Called by `valkey_client.py`.

All keys of a script belong to one shard. The first key is the shard's id and the first argument its expected value: a
server that was emptied or replaced refuses. Scripts that publish refuse terms that are over: a coordinator that was
paused cannot overwrite what a newer one published.
"""

from __future__ import annotations

WRONG_MAP = "LMKVMAP"
"""Prefix of the error that all scripts return if the shard's id is another one."""

_CHECK = f"""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return redis.error_reply('{WRONG_MAP} the layout map was replaced by another one')
end
"""

_NEWEST = """
local newest = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
local previous = newest[1] and newest[1][1] or '0-0'
"""

# Coordinators of another protocol renew their id every few seconds. It is left to them while they do.
CLAIM = """
local id = redis.call('GET', KEYS[1])
if id and string.match(id, '^(%d+)-') ~= string.match(ARGV[1], '^(%d+)-') then
  if redis.call('PTTL', KEYS[1]) > ARGV[2] - ARGV[3] then return id end
  redis.call('DEL', KEYS[1])
end
redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return redis.call('GET', KEYS[1])
"""
"""KEYS id; ARGV an id, PROTOCOL_VERSION-WORD, to set if there is none, its lifetime, and the time after which one of
another protocol that is not renewed is replaced. Returns the id."""

TAIL = f"""{_CHECK}{_NEWEST}
return previous
"""
"""KEYS id, log; ARGV id. Returns the newest entry's id."""

# A term is greater than the instance's last one, the shard's last one, and the time in microseconds: it increases
# strictly if the instance's key is lost, also after the clock was set back, and if both keys are lost.
TERM = f"""{_CHECK}
local time = redis.call('TIME')
local last = math.max(tonumber(redis.call('GET', KEYS[2]) or 0), tonumber(redis.call('GET', KEYS[3]) or 0))
local term = string.format('%.0f', math.max(last + 1, time[1] * 1000000 + time[2]))
redis.call('SET', KEYS[2], term, 'PX', ARGV[2])
redis.call('SET', KEYS[3], term, 'PX', ARGV[2])
redis.call('HSET', KEYS[4] .. term, ARGV[4], ARGV[5])
redis.call('PEXPIRE', KEYS[4] .. term, ARGV[3])
return term
"""
"""KEYS id, term, the shard's last term, prefix of the held records' key; ARGV id, lifetimes of the terms and of the
records, the marker's field and value. Returns the term."""

PUBLISH = f"""{_CHECK}{_NEWEST}
local function admit(held, place, tokens, keys)
  local words = {{}}
  local width = #tokens / (#keys / 16)
  for at = 1, #keys, 16 do
    words[#words + 1] = place .. string.sub(keys, at, at + 15)
    local own = (at - 1) / 16 * width
    words[#words + 1] = #tokens == 4 and tokens or string.sub(tokens, own + 1, own + width)
    if #words == 4000 then
      redis.call('HSET', held, unpack(words))
      words = {{}}
    end
  end
  if #words > 0 then redis.call('HSET', held, unpack(words)) end
end
local function evict(held, place, keys)
  local words = {{}}
  for at = 1, #keys, 16 do
    words[#words + 1] = place .. string.sub(keys, at, at + 15)
    if #words == 4000 then
      redis.call('HDEL', held, unpack(words))
      words = {{}}
    end
  end
  if #words > 0 then redis.call('HDEL', held, unpack(words)) end
end
local replies, at = {{}}, 5
for key = 3, #KEYS, 3 do
  local held, current = KEYS[key + 1], KEYS[key + 2]
  local kind, term, epoch, entry, count = unpack(ARGV, at, at + 4)
  at = at + 5
  local reply = 'ok'
  if redis.call('GET', KEYS[key]) ~= term then
    reply = 'fenced'
  elseif redis.call('EXISTS', held) == 0 then
    reply = 'lost'
  end
  for change = 1, count do
    if reply == 'ok' then
      admit(held, ARGV[at], ARGV[at + 1], ARGV[at + 2])
      evict(held, ARGV[at], ARGV[at + 3])
    end
    at = at + 4
  end
  if reply == 'ok' then
    local known = redis.call('GET', current)
    local known_term = known and string.match(known, '^%d+')
    if kind == 'complete' then
      if known_term and known_term ~= term then
        redis.call('UNLINK', string.sub(held, 1, #held - #term) .. known_term)
      end
      redis.call('SET', current, term .. ' ' .. epoch, 'PX', ARGV[2])
    elseif kind == 'gone' then
      redis.call('UNLINK', held)
      if known_term == term then redis.call('DEL', current) end
    end
    redis.call('PEXPIRE', held, ARGV[2])
    if entry ~= '' then
      previous = redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*', 'p', previous, 'e', entry)
    end
  end
  replies[#replies + 1] = reply
end
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return replies
"""
"""KEYS id, log, and per entry: term, held, current; ARGV id, lifetime of the records, length and lifetime of the log,
and per entry: kind, term, epoch, encoded entry or empty, number of changes, and per change: field prefix, values
(one of 4 bytes for all, or one per admitted key, all of the same length), admitted and evicted keys. Returns `ok`,
`fenced` or `lost` per entry."""

RENEW = f"""{_CHECK}
local replies, at = {{}}, 4
for key = 2, #KEYS, 3 do
  local reply = 'ok'
  if redis.call('GET', KEYS[key]) ~= ARGV[at] then
    reply = 'fenced'
  else
    redis.call('PEXPIRE', KEYS[key], ARGV[2])
    local held = redis.call('PEXPIRE', KEYS[key + 1], ARGV[3])
    local current = redis.call('PEXPIRE', KEYS[key + 2], ARGV[3])
    if held == 0 or (current == 0 and ARGV[at + 1] == '1') then reply = 'lost' end
  end
  at = at + 2
  replies[#replies + 1] = reply
end
return replies
"""
"""KEYS id, and per publication: term, held, current; ARGV id, lifetimes of terms and of the rest, and per publication:
its term and whether it is complete. Returns `ok`, `fenced` or `lost` per publication."""

CURRENT = f"""{_CHECK}
return redis.call('GET', KEYS[2]) or ''
"""
"""KEYS id, current; ARGV id. Returns term and epoch of the complete snapshot, or an empty string."""

SCAN = f"""{_CHECK}
local found = redis.call('HSCAN', KEYS[2], ARGV[2], 'COUNT', ARGV[3])
return {{found[1], table.concat(found[2])}}
"""
"""KEYS id, held; ARGV id, cursor, approximate number of records. Returns the next cursor
and the records in one string."""

WRITE_OPERATIONS = f"""{_CHECK}
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local held, lifetime, at = KEYS[3] .. ARGV[2], tonumber(ARGV[3]), 6
for removed = 1, ARGV[5] do
  redis.call('HDEL', held, ARGV[at])
  at = at + 1
end
for pair = at, #ARGV, 2 do
  redis.call('HSET', held, ARGV[pair], ARGV[pair + 1])
end
redis.call('PEXPIRE', held, lifetime)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - lifetime)
redis.call('ZADD', KEYS[2], now - ARGV[4], ARGV[2])
redis.call('PEXPIRE', KEYS[2], lifetime)
return redis.call('HLEN', held)
"""
"""KEYS id, the coordinators that wrote, prefix of their records' keys; ARGV id, coordinator, lifetime, how long ago it
counts as having written, number of removed names, these, and names with records. Returns the number of its records."""

READ_OPERATIONS = f"""{_CHECK}
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local found, left = {{}}, tonumber(ARGV[3])
local owners = redis.call('ZREVRANGE', KEYS[2], 0, -1, 'WITHSCORES')
for at = 1, #owners, 2 do
  local held, words = KEYS[3] .. owners[at], {{}}
  local names = ARGV[2] ~= '' and {{ARGV[2]}} or redis.call('HKEYS', held)
  table.sort(names, function(one, other) return string.sub(one, -16) > string.sub(other, -16) end)
  for _, name in ipairs(names) do
    left = left - redis.call('HSTRLEN', held, name)
    local record = left >= 0 and redis.call('HGET', held, name)
    if record then
      words[#words + 1] = name
      words[#words + 1] = record
    end
  end
  if #words > 0 then
    found[#found + 1] = {{owners[at], string.format('%.0f', now - owners[at + 1]), words}}
  end
end
return found
"""
"""KEYS id, the coordinators that wrote, prefix of their records' keys; ARGV id, name of an operation or empty, and how
many bytes to read at most. Returns for each coordinator, the one that wrote last first: its name, the milliseconds
since then, and names with records, newest operation first."""

ALL = (CLAIM, TAIL, TERM, PUBLISH, RENEW, CURRENT, SCAN, WRITE_OPERATIONS, READ_OPERATIONS)
