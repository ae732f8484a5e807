#!lua name=sandbox_@VERSION@

-- What the queue does in one step each; `queue.py` beside this file tells the whole story. A record is the hash
-- that stands for one call from its put until its result is forgotten:
--
--     digest     of the call: what is put under the same name must be the same call
--     stream     and
--     entry      where it waits or runs; only the worker of this entry can settle it
--     due_ms     when the answer is due
--     waiters    reply streams of the gateways that wait, with a space between
--     job        somebody will ask for the result later: nobody's going away cancels the call
--     keep       ms for which a result is kept
--     cancelled  nobody wants it any more: whoever takes the entry drops it
--     result     the ToolResult's JSON; then stream, entry and waiters are gone
--     fault      the result says nothing about the program, so putting the call again runs it again
--
-- Every command answers for each call by a list that begins with a word.

-- One XADD carries so many pairs; the interpreter's stack ends at some 8,000 values.
local PAIRS = 1000

-- Results of so many bytes go into one answer, which must be read in time; the first one always does.
local ROOM = 4 * 1024 * 1024

-- Few results are large, and those would fill the memory if they were kept for as long.
local LARGE, LARGE_KEEP_MS = 64 * 1024, 10000

local function waits(waiters, waiter)
    return string.find(' ' .. waiters .. ' ', ' ' .. waiter .. ' ', 1, true) ~= nil
end

local function without(waiters, waiter)
    local left = {}
    for other in string.gmatch(waiters, '%S+') do
        if other ~= waiter then
            left[#left + 1] = other
        end
    end
    return table.concat(left, ' ')
end

local function join(record, waiters, waiter)
    if not waits(waiters, waiter) then
        redis.call('HSET', record, 'waiters', waiters == '' and waiter or waiters .. ' ' .. waiter)
    end
end

-- Holds what was handed back, so that the worker which gave it up can leave the group.
local NOBODY = 'nobody'

-- The worker that holds an entry; nil when none has taken it, or it was handed back or settled.
local function holder(stream, group, entry)
    local pending = redis.call('XPENDING', stream, group, entry, entry, 1)
    if pending[1] and pending[1][2] ~= NOBODY then
        return pending[1][2]
    end
    return nil
end

-- Adds the replies, pairs of record and result by reply stream, so that each gateway gets one entry.
local function send(replies, ttl_s)
    for waiter, pairs_ in pairs(replies) do
        for first = 1, #pairs_, 2 * PAIRS do
            redis.call('XADD', waiter, '*', unpack(pairs_, first, math.min(first + 2 * PAIRS - 1, #pairs_)))
        end
        redis.call('EXPIRE', waiter, ttl_s)
    end
end

local function reply(replies, waiters, record, result)
    for waiter in string.gmatch(waiters, '%S+') do
        local pairs_ = replies[waiter] or {}
        replies[waiter] = pairs_
        pairs_[#pairs_ + 1] = record
        pairs_[#pairs_ + 1] = result
    end
end

-- KEYS stream, record for each call
-- ARGV waiter; then digest, call, accepted_ms, deadline_ms, ttl_ms, keep_ms, job (1 or '') for each
-- queued | joined | kept, result | other (the name stands for a different call) | later (put it again: kept, and this
-- answer is full)
local function put(keys, args)
    local waiter, answers, room = args[1], {}, ROOM
    for i = 1, #keys / 2 do
        local stream, record = keys[2 * i - 1], keys[2 * i]
        local digest, call, accepted, deadline, ttl, keep, job = unpack(args, 7 * i - 5, 7 * i + 1)
        local known = redis.call('HMGET', record, 'digest', 'cancelled', 'fault', 'result', 'waiters')
        if known[1] and known[1] ~= digest then
            answers[i] = {'other'}
        elseif known[4] and not known[3] then
            if job ~= '' then
                redis.call('PEXPIRE', record, keep, 'GT')
            end
            if room == ROOM or #known[4] <= room then
                room = room - #known[4]
                answers[i] = {'kept', known[4]}
            else
                answers[i] = {'later'}
            end
        elseif known[1] and not known[2] and not known[3] then
            join(record, known[5] or '', waiter)
            if job ~= '' then
                redis.call('HSET', record, 'job', 1, 'keep', keep)
            end
            redis.call('PEXPIRE', record, ttl, 'GT')
            answers[i] = {'joined'}
        else
            local entry = redis.call(
                'XADD', stream, '*',
                'call', call, 'record', record, 'accepted_ms', accepted, 'deadline_ms', deadline
            )
            if known[1] then
                redis.call('DEL', record)
            end
            redis.call(
                'HSET', record,
                'digest', digest, 'stream', stream, 'entry', entry, 'due_ms', deadline, 'waiters', waiter, 'keep', keep
            )
            if job ~= '' then
                redis.call('HSET', record, 'job', 1)
            end
            redis.call('PEXPIRE', record, ttl)
            answers[i] = {'queued'}
        end
    end
    return answers
end

-- Whether the record still stands for this entry and somebody wants it. One that has expired is for the worker to
-- answer: it is past its deadline.
local function wanted(record, entry)
    local known = redis.call('HMGET', record, 'entry', 'cancelled', 'digest')
    return not known[3] or (known[1] == entry and not known[2])
end

-- Adds entries to `taken`, without those that nobody wants, which are acknowledged.
local function hand_out(taken, stream, group, entries, times)
    local dropped = {}
    for _, found in ipairs(entries) do
        local entry, fields = found[1], found[2]
        local record = nil
        for i = 1, fields and #fields or 0, 2 do
            if fields[i] == 'record' then
                record = fields[i + 1]
            end
        end
        if record and not wanted(record, entry) then
            dropped[#dropped + 1] = entry
        else
            taken[#taken + 1] = {stream, entry, fields, times[entry] or 1}
        end
    end
    if #dropped > 0 then
        redis.call('XACK', stream, group, unpack(dropped))
    end
end

-- KEYS streams, the preferred one first   ARGV group, consumer, count
-- Entries of the first stream that has any: stream, entry, fields, times delivered
local function take(keys, args)
    local group, consumer, count = args[1], args[2], args[3]
    local taken = {}
    for _, stream in ipairs(keys) do
        repeat
            local read = redis.call(
                'XREADGROUP', 'GROUP', group, consumer, 'COUNT', count, 'STREAMS', stream, '>'
            )
            if read then
                hand_out(taken, stream, group, read[1][2], {})
            end
        until not read or #taken > 0
        if #taken > 0 then
            break
        end
    end
    return taken
end

-- KEYS streams   ARGV group, consumer, count; then stream, entry of each that the consumer knows of
-- What else is pending with it, as `take` gives it, with leases that begin anew
local function resume(keys, args)
    local group, consumer, count = args[1], args[2], args[3]
    local known, taken = {}, {}
    for i = 4, #args, 2 do
        known[args[i] .. ' ' .. args[i + 1]] = true
    end
    for _, stream in ipairs(keys) do
        local missed, times = {}, {}
        for _, pending in ipairs(redis.call('XPENDING', stream, group, '-', '+', count, consumer)) do
            local entry = pending[1]
            if not known[stream .. ' ' .. entry] then
                redis.call('XCLAIM', stream, group, consumer, 0, entry, 'JUSTID')
                missed[#missed + 1] = redis.call('XRANGE', stream, entry, entry)[1]
                times[entry] = pending[4]
            end
        end
        hand_out(taken, stream, group, missed, times)
    end
    return taken
end

-- KEYS streams   ARGV group, consumer, idle_ms, count
-- Entries that nobody has renewed for so long, as `take` gives them
local function reclaim(keys, args)
    local group, consumer, idle_ms, count = args[1], args[2], args[3], tonumber(args[4])
    local taken = {}
    for _, stream in ipairs(keys) do
        redis.call('XPENDING', stream, group) -- a group that is gone must show before anything is claimed
    end
    for _, stream in ipairs(keys) do
        local first = '-'
        while #taken < count do
            local idle = redis.call('XPENDING', stream, group, 'IDLE', idle_ms, first, '+', count - #taken)
            if #idle == 0 then
                break
            end
            local times, ids = {}, {}
            for i, pending in ipairs(idle) do
                ids[i] = pending[1]
                times[pending[1]] = pending[4] + 1
            end
            -- What is claimed is as idle as `idle_ms` again when that is 0.
            first = '(' .. ids[#ids]
            hand_out(taken, stream, group, redis.call('XCLAIM', stream, group, consumer, idle_ms, unpack(ids)), times)
        end
    end
    return taken
end

-- KEYS dead letters; then stream, record for each
-- ARGV group, reply_ttl_s; then entry, result ('' for none), final (1, or 0 for a fault), dead (fields as JSON, or '') for each
-- 1 for each that was settled now, 0 where somebody else did it before
local function settle(keys, args)
    local group, settled, replies = args[1], {}, {}
    for i = 1, (#keys - 1) / 2 do
        local stream, record = keys[2 * i], keys[2 * i + 1]
        local entry, result, final, dead = unpack(args, 4 * i - 1, 4 * i + 2)
        settled[i] = redis.call('XACK', stream, group, entry)
        local known = redis.call('HMGET', record, 'entry', 'waiters', 'job', 'keep')
        if settled[i] == 1 and known[1] == entry then
            if result ~= '' then
                reply(replies, known[2], record, result)
            end
            if result ~= '' and (final == '1' or known[3]) then
                redis.call('HDEL', record, 'stream', 'entry', 'waiters', 'cancelled')
                redis.call('HSET', record, 'result', result)
                if final ~= '1' then
                    redis.call('HSET', record, 'fault', 1)
                end
                local keep = tonumber(known[4])
                if #result > LARGE and not known[3] then
                    keep = math.min(keep, LARGE_KEEP_MS)
                end
                redis.call('PEXPIRE', record, keep)
            else
                redis.call('DEL', record)
            end
        end
        if settled[i] == 1 and dead ~= '' then
            redis.call('XADD', keys[1], 'MAXLEN', 1000, '*', 'letter', dead)
        end
    end
    send(replies, args[2])
    return settled
end

-- KEYS stream, record for each   ARGV group, consumer; then entry for each
-- 1 for each that is still ours and wanted, and has its lease begun anew, else 0
local function renew(keys, args)
    local group, consumer, renewed = args[1], args[2], {}
    for i = 1, #keys / 2 do
        local stream, record, entry = keys[2 * i - 1], keys[2 * i], args[i + 2]
        if holder(stream, group, entry) == consumer and wanted(record, entry) then
            redis.call('XCLAIM', stream, group, consumer, 0, entry, 'JUSTID')
            renewed[i] = 1
        else
            renewed[i] = 0
        end
    end
    return renewed
end

-- KEYS stream for each   ARGV group, consumer, idle_ms; then entry, times delivered for each
-- Leaves what is ours to anybody, and as if we had never had it
local function hand_back(keys, args)
    local group, consumer, idle_ms = unpack(args, 1, 3)
    for i, stream in ipairs(keys) do
        local entry, times = args[2 * i + 2], args[2 * i + 3]
        if holder(stream, group, entry) == consumer then
            redis.call(
                'XCLAIM', stream, group, NOBODY, 0, entry,
                'IDLE', idle_ms, 'RETRYCOUNT', times - 1, 'JUSTID'
            )
        end
    end
    return redis.status_reply('OK')
end

-- KEYS streams   ARGV group, idle_ms, consumer ('' for any)
-- Takes those consumers out of the group that hold nothing and have been silent for so long
local function forget_consumers(keys, args)
    for _, stream in ipairs(keys) do
        for _, flat in ipairs(redis.call('XINFO', 'CONSUMERS', stream, args[1])) do
            local info = {}
            for i = 1, #flat, 2 do
                info[flat[i]] = flat[i + 1]
            end
            local is_meant = args[3] == '' or info.name == args[3]
            if is_meant and info.pending == 0 and info.idle >= tonumber(args[2]) then
                redis.call('XGROUP', 'DELCONSUMER', stream, args[1], info.name)
            end
        end
    end
    return redis.status_reply('OK')
end

-- What is known of a call, and what of its record, for `cancel` and `watch`.
local function look(record, group)
    local known = redis.call('HMGET', record, 'result', 'stream', 'entry', 'waiters', 'job', 'cancelled', 'due_ms')
    if known[1] then
        return {'done', known[1]}, known
    end
    if not known[2] or known[6] then
        return {'unknown'}, known
    end
    local worker = holder(known[2], group, known[3])
    return worker and {'running', worker, known[7]} or {'waiting', '', known[7]}, known
end

-- KEYS records   ARGV waiter ('' for all, and the job too), group, prefix of order streams, ttl_s
-- Takes the waiter away; a call that nobody waits for then is cancelled
-- done, result | running, worker, due_ms | waiting, '', due_ms | unknown | later (ask again: this answer is full), as it was
local function cancel(keys, args)
    local waiter, group, orders, ttl_s = unpack(args, 1, 4)
    local answers, records, replies, room = {}, {}, {}, ROOM
    for i, record in ipairs(keys) do
        answers[i], records[i] = look(record, group) -- all before any change, for a group that is gone fails it
        if answers[i][1] == 'done' then
            if room == ROOM or #answers[i][2] <= room then
                room = room - #answers[i][2]
            else
                answers[i] = {'later'}
            end
        end
    end
    for i, record in ipairs(keys) do
        local answer, known = answers[i], records[i]
        if answer[1] == 'running' or answer[1] == 'waiting' then
            local left, job = '', nil
            if waiter == '' then
                reply(replies, known[4], record, '')
            else
                left, job = without(known[4], waiter), known[5]
            end
            redis.call('HSET', record, 'waiters', left)
            if left == '' and not job then
                redis.call('HSET', record, 'cancelled', 1)
                if answer[1] == 'running' then
                    redis.call('XADD', orders .. answer[2], 'MAXLEN', '~', 10000, '*', 'stream', known[2], 'entry', known[3])
                    redis.call('EXPIRE', orders .. answer[2], ttl_s)
                end
            end
        end
    end
    send(replies, ttl_s)
    return answers
end

-- KEYS record   ARGV waiter ('' for a look only), group
-- Waits for a call that was put before; the answers are those of `cancel`
local function watch(keys, args)
    local answer, known = look(keys[1], args[2])
    if args[1] ~= '' and (answer[1] == 'running' or answer[1] == 'waiting') then
        join(keys[1], known[4], args[1])
    end
    return answer
end

local function register(name, callback, ...)
    redis.register_function{function_name = name .. '_@VERSION@', callback = callback, flags = {...}}
end

-- A full Redis takes no new calls. All that makes room again, or only moves what is there, it must not refuse.
register('put', put)
register('take', take, 'allow-oom')
register('resume', resume, 'allow-oom')
register('reclaim', reclaim, 'allow-oom')
register('settle', settle, 'allow-oom')
register('renew', renew, 'allow-oom')
register('hand_back', hand_back, 'allow-oom')
register('forget_consumers', forget_consumers, 'allow-oom')
register('cancel', cancel, 'allow-oom')
register('watch', watch, 'allow-oom')
