-- wrk script: chat completions of 64 sessions that share one system prompt.
--
--   wrk [options] -s chat.lua URL -- SYSTEM_BYTES whole|stream EVENTS PACE_MS
--
-- All requests are rendered before the first is sent, so that a long prompt costs the load generator nothing. The last
-- line of its output is JSON for race.py.

local SESSIONS = 64
local SYSTEM = "Answer from the manual below, briefly, and name the page. "
local USER = "Session %d asks about part %d: how is it mounted, what does it need, and who may replace it? "
local USER_REPEATS = 4
local BODY = '{"model":"tiny","stream":%s,"max_tokens":%d,"seed":%d,"messages":['
  .. '{"role":"system","content":"%s"},{"role":"user","content":"%s"}]}'

local requests = {}
local sent = 0

-- wrk's table of arguments begins with the URL at 0.
function init(args)
  local system_bytes = assert(tonumber(args[1]), "chat.lua: SYSTEM_BYTES is missing")
  assert(args[2] == "whole" or args[2] == "stream", "chat.lua: say 'whole' or 'stream'")
  local stream = tostring(args[2] == "stream")
  local events, pace_ms = assert(tonumber(args[3])), assert(tonumber(args[4]))
  local system = SYSTEM:rep(math.ceil(system_bytes / #SYSTEM)):sub(1, system_bytes)
  local headers = { ["Content-Type"] = "application/json" }
  for session = 1, SESSIONS do
    local user = USER:format(session, session * 7):rep(USER_REPEATS)
    requests[session] = wrk.format("POST", "/v1/chat/completions", headers, BODY:format(stream, events, pace_ms, system, user))
  end
end

function request()
  sent = sent + 1
  return requests[sent % SESSIONS + 1]
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    '\n{"requests":%d,"duration_us":%d,"bytes":%d,"p50_us":%d,"p99_us":%d,"errors":%d}\n',
    summary.requests, summary.duration, summary.bytes, latency:percentile(50), latency:percentile(99),
    errors.connect + errors.read + errors.write + errors.status + errors.timeout
  ))
end
