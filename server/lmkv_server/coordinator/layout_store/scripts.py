"""What Valkey does in one step: a script each. Used by `store.py`, which says what their arguments are.

All keys of a script are of one shard. The first is the shard's id, and the first argument what it shall be: a server
that was emptied, or another one, refuses. Scripts that publish refuse terms that are over: a coordinator that stood
still cannot overwrite what a newer one told.
"""

from __future__ import annotations

WRONG_MAP = "LMKVMAP"
"""What the error begins with that all scripts give if the shard's id is another one."""

_CHECK = f"""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return redis.error_reply('{WRONG_MAP} the layout map is another one')
end
"""

_NEWEST = """
local newest = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
local previous = newest[1] and newest[1][1] or '0-0'
"""

CLAIM = """
redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return redis.call('GET', KEYS[1])
"""
"""KEYS id; ARGV an id if there is none yet, its lifetime. The id that there is."""

TAIL = f"""{_CHECK}{_NEWEST}
return previous
"""
"""KEYS id, log; ARGV id. The newest entry's id."""

# A term follows the instance's last one, the shard's last one, and the time in microseconds: it rises strictly though
# the instance's key is lost, even where the clock was set back, and though both keys are lost.
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
"""KEYS id, term, the shard's last term, held without its term; ARGV id, lifetime of the terms, of what is held, the
opening. The term."""

PUBLISH = f"""{_CHECK}{_NEWEST}
local function admit(held, place, tokens, keys)
  local words = {{}}
  for at = 1, #keys, 16 do
    words[#words + 1] = place .. string.sub(keys, at, at + 15)
    local own = (at - 1) / 4
    words[#words + 1] = #tokens == 4 and tokens or string.sub(tokens, own + 1, own + 4)
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
"""KEYS id, log, and for each note term, held, current; ARGV id, lifetime of what is held, most entries of the log, its
lifetime, and for each note kind, term, epoch, entry or nothing, count of changes, and for each of these place, tokens,
admitted and evicted keys. For each note `ok`, `fenced` or `lost`."""

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
"""KEYS id, and for each publication term, held, current; ARGV id, lifetime of terms, of the rest, and for each
publication its term and whether it is complete. For each `ok`, `fenced` or `lost`."""

CURRENT = f"""{_CHECK}
return redis.call('GET', KEYS[2]) or ''
"""
"""KEYS id, current; ARGV id. Term and epoch of what is complete."""

SCAN = f"""{_CHECK}
local found = redis.call('HSCAN', KEYS[2], ARGV[2], 'COUNT', ARGV[3])
return {{found[1], table.concat(found[2])}}
"""
"""KEYS id, held; ARGV id, cursor, about how many. The next cursor, and the records in one string."""

ALL = (CLAIM, TAIL, TERM, PUBLISH, RENEW, CURRENT, SCAN)
