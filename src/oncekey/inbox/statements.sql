-- Statements that SQLite and PostgreSQL read alike: what people look at and do. What is hot, and so
-- written for one of them, is in their own rooms. $1 is ?1 in SQLite.

-- name: event
SELECT id, source, type, key, headers, body FROM oncekey_inbox_event WHERE id = $1

-- name: event_deliveries
SELECT target, due_at, tries, status, error, held_by, order_key, fence
FROM oncekey_inbox_delivery WHERE id = $1 ORDER BY target

-- name: event_dead
SELECT target, tries, status, error, order_key FROM oncekey_inbox_dead WHERE id = $1 ORDER BY target

-- name: event_attempts
SELECT target, number, at, ms, outcome, status, error, note, actor
FROM oncekey_inbox_attempt WHERE event = $1 ORDER BY at, target, number

-- name: event_duplicates
-- The bodies of the last 20 that differ: what is shown of an event must fit into memory.
SELECT at, same, CASE WHEN newest <= 20 THEN body END FROM (
    SELECT at, same, body, row_number() OVER (PARTITION BY same ORDER BY at DESC) AS newest
    FROM oncekey_inbox_duplicate WHERE event = $1
) AS copies ORDER BY at, same DESC, newest DESC LIMIT 1000

-- name: event_actions
SELECT id, at, actor, action, subject, detail
FROM oncekey_inbox_audit WHERE subject = $1 ORDER BY id LIMIT 1000

-- name: issues
SELECT target, status, error, sum(dead), sum(failing), min(id), max(id)
FROM (
    SELECT target, status, error, id, 1 AS dead, 0 AS failing FROM oncekey_inbox_dead
    UNION ALL
    SELECT target, status, error, id, 0, 1 FROM oncekey_inbox_delivery WHERE error <> ''
) AS failures
GROUP BY target, status, error ORDER BY count(*) DESC, target, status, error LIMIT $1

-- name: depths
-- Targets one after another by the index, and the first of each counted: no look at all that waits.
WITH RECURSIVE names (target) AS (
    SELECT min(target) FROM oncekey_inbox_delivery
    UNION ALL
    SELECT (SELECT min(d.target) FROM oncekey_inbox_delivery d WHERE d.target > n.target)
    FROM names n WHERE n.target IS NOT NULL
), buried AS (
    SELECT target, count(*) AS dead FROM oncekey_inbox_dead GROUP BY target
)
SELECT n.target,
       (SELECT count(*) FROM (
            SELECT 1 FROM oncekey_inbox_delivery d WHERE d.target = n.target LIMIT 100000) AS counted),
       coalesce((SELECT b.dead FROM buried b WHERE b.target = n.target), 0),
       (SELECT min(id) FROM (
            SELECT d.id FROM oncekey_inbox_delivery d WHERE d.target = n.target
            ORDER BY d.due_at, d.id LIMIT 10000) AS oldest)
FROM names n WHERE n.target IS NOT NULL
UNION ALL
SELECT b.target, 0, b.dead, NULL FROM buried b
WHERE NOT EXISTS (SELECT 1 FROM oncekey_inbox_delivery d WHERE d.target = b.target)

-- name: counts
SELECT minute, kind, name, sum(n), bucket FROM oncekey_inbox_minute
WHERE minute >= $1 AND minute <= $2
GROUP BY minute, kind, name, bucket ORDER BY minute, kind, name, bucket

-- name: last_received
SELECT minute FROM oncekey_inbox_minute WHERE kind = 'received' AND name = $1
ORDER BY minute DESC LIMIT 1

-- name: add_count
INSERT INTO oncekey_inbox_minute (minute, node, kind, name, bucket, n)
VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (minute, node, kind, name, bucket)
DO UPDATE SET n = oncekey_inbox_minute.n + excluded.n

-- name: prune_counts
DELETE FROM oncekey_inbox_minute WHERE minute < $1

-- name: add_rejected
INSERT INTO oncekey_inbox_rejected (at, source, cause, detail) VALUES ($1, $2, $3, $4)

-- name: prune_rejected
DELETE FROM oncekey_inbox_rejected
WHERE id <= (SELECT max(id) FROM oncekey_inbox_rejected) - CAST($1 AS bigint)

-- name: rejected
SELECT id, at, source, cause, detail FROM oncekey_inbox_rejected
WHERE id < $1 ORDER BY id DESC LIMIT $2

-- name: sources
SELECT name FROM oncekey_inbox_source ORDER BY name

-- name: add_source
INSERT INTO oncekey_inbox_source (name) VALUES ($1) ON CONFLICT DO NOTHING

-- name: targets
SELECT name, status, at, actor, reason FROM oncekey_inbox_target ORDER BY name

-- name: set_target
INSERT INTO oncekey_inbox_target (name, status, at, actor, reason) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (name) DO UPDATE SET status = excluded.status, at = excluded.at,
    actor = excluded.actor, reason = excluded.reason

-- name: add_audit
INSERT INTO oncekey_inbox_audit (at, actor, action, subject, detail, number, before, hash)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8)

-- name: hold_head
-- Whoever adds to the audit holds its head until the commit: one after another.
UPDATE oncekey_inbox_head SET head = head WHERE one = 1 RETURNING head

-- name: move_head
UPDATE oncekey_inbox_head SET head = $1 WHERE one = 1

-- name: head
SELECT head FROM oncekey_inbox_head WHERE one = 1

-- name: chained
SELECT id, number, at, actor, action, subject, detail, before, hash FROM oncekey_inbox_audit
WHERE id > $1 AND number > 0 ORDER BY id LIMIT 1000

-- name: in_hand
SELECT id, target, held_by, due_at, tries FROM oncekey_inbox_delivery
WHERE held_by <> '' AND due_at < $1 ORDER BY due_at, id, target LIMIT $2

-- name: audit
SELECT id, at, actor, action, subject, detail FROM oncekey_inbox_audit
WHERE id < $1 ORDER BY id DESC LIMIT $2

-- name: event_targets
SELECT target FROM oncekey_inbox_delivery WHERE id = $1
UNION SELECT target FROM oncekey_inbox_dead WHERE id = $1
UNION SELECT target FROM oncekey_inbox_attempt WHERE event = $1

-- name: event_exists
SELECT 1 FROM oncekey_inbox_event WHERE id = $1

-- name: hurry
-- A delivery that waits is due now, and starts to count anew. One in hand, or parked, stays.
UPDATE oncekey_inbox_delivery SET due_at = $3, tries = 0, held_by = ''
WHERE id = $1 AND target = $2 AND due_at < $4 AND (held_by = '' OR due_at <= $3)
RETURNING fence

-- name: is_waiting
SELECT 1 FROM oncekey_inbox_delivery WHERE id = $1 AND target = $2

-- name: exhume
DELETE FROM oncekey_inbox_dead WHERE id = $1 AND target = $2 RETURNING fence, order_key

-- name: last_attempt
SELECT max(number) FROM oncekey_inbox_attempt WHERE event = $1 AND target = $2

-- name: queue
INSERT INTO oncekey_inbox_delivery (id, target, due_at, tries, fence, order_key, held_by, status, error)
VALUES ($1, $2, $3, 0, $4, NULL, '', 0, '') ON CONFLICT DO NOTHING RETURNING 1

-- name: drop_delivery
DELETE FROM oncekey_inbox_delivery WHERE id = $1 AND target = $2 RETURNING fence, order_key

-- name: order_key
SELECT order_key FROM oncekey_inbox_delivery WHERE id = $1 AND order_key IS NOT NULL

-- name: add_attempt
INSERT INTO oncekey_inbox_attempt (event, target, number, at, ms, outcome, status, error, note, actor)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)

-- name: promote
-- The next of an entity's events, once the one before it is finished.
UPDATE oncekey_inbox_delivery SET due_at = $3
WHERE target = $1 AND order_key = $2 AND due_at = $4 AND id = (
    SELECT min(o.id) FROM oncekey_inbox_delivery o WHERE o.target = $1 AND o.order_key = $2)

-- name: take
-- In the caller's own transaction: a delivery is finished if this is still its last fence.
DELETE FROM oncekey_inbox_delivery WHERE id = $1 AND target = $2 AND fence = $3 RETURNING 1

-- name: add_bulk
INSERT INTO oncekey_inbox_bulk (at, actor, query, rate, total, done, state, place, target, moved_at)
VALUES ($1, $2, $3, $4, $5, 0, 'running', $6, '', $1) RETURNING id

-- name: bulks
SELECT id, at, actor, query, rate, total, done, state FROM oncekey_inbox_bulk
ORDER BY id DESC LIMIT $1

-- name: running_bulks
SELECT id FROM oncekey_inbox_bulk WHERE state = 'running' ORDER BY id

-- name: hold_bulk
UPDATE oncekey_inbox_bulk SET moved_at = moved_at WHERE id = $1 AND state = 'running'
RETURNING query, rate, place, target, moved_at, actor, at

-- name: move_bulk
UPDATE oncekey_inbox_bulk SET place = $2, target = $3, done = done + CAST($4 AS bigint), state = $5,
    moved_at = $6
WHERE id = $1

-- name: cancel_bulk
UPDATE oncekey_inbox_bulk SET state = 'cancelled' WHERE id = $1 AND state = 'running' RETURNING 1

-- name: put_note
INSERT INTO oncekey_inbox_note (name, value, until) VALUES ($1, $2, $3)
ON CONFLICT (name) DO UPDATE SET value = excluded.value, until = excluded.until

-- name: get_note
SELECT value FROM oncekey_inbox_note WHERE name = $1 AND until > $2

-- name: take_note
DELETE FROM oncekey_inbox_note WHERE name = $1 AND until > $2 RETURNING value

-- name: drop_note
DELETE FROM oncekey_inbox_note WHERE name = $1

-- name: prune_notes
DELETE FROM oncekey_inbox_note WHERE until <= $1
