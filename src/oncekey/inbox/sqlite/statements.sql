-- name: create_versions
CREATE TABLE IF NOT EXISTS oncekey_inbox_schema (version INTEGER NOT NULL PRIMARY KEY, applied_at INTEGER NOT NULL)

-- name: version
SELECT coalesce(max(version), 0) FROM oncekey_inbox_schema

-- name: add_version
INSERT INTO oncekey_inbox_schema (version, applied_at) VALUES (?, ?)

-- name: tables
SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'oncekey_inbox_%'

-- name: last_id
SELECT max(id) FROM oncekey_inbox_event

-- name: remember
-- The key's own record, of the kind that every guard writes; its answer names the event.
INSERT INTO oncekey_records
    (key, scope, state, owner, fence, fingerprint, lease_until, expires_at, purge_at, attempts, answer)
VALUES (?1, ?2, 1, x'', ?3, ?4, 0, ?5, ?5, 1, ?6)
ON CONFLICT DO NOTHING

-- name: free
-- A record that stands in the way of a key that is free: past its time, given back, or of nobody.
DELETE FROM oncekey_records
WHERE key = ? AND (state <> 1 OR expires_at <= ? OR answer IS NULL)

-- name: remembered
SELECT fingerprint, answer FROM oncekey_records WHERE key = ?

-- name: add_event
INSERT INTO oncekey_inbox_event (id, source, type, key, headers, body) VALUES (?, ?, ?, ?, ?, ?)

-- name: add_delivery
INSERT INTO oncekey_inbox_delivery (id, target, due_at, tries, fence, order_key, held_by, status, error)
VALUES (?, ?, ?, 0, 0, ?, '', 0, '')

-- name: has_earlier
SELECT 1 FROM oncekey_inbox_delivery WHERE target = ? AND order_key = ? LIMIT 1

-- name: stopped
SELECT name, status FROM oncekey_inbox_target WHERE status <> 'active'

-- name: add_duplicate
INSERT INTO oncekey_inbox_duplicate (event, at, same, body) VALUES (?, ?, ?, ?)

-- name: due
SELECT d.id, d.tries, d.fence, d.order_key, e.source, e.type, e.key, e.headers, e.body
FROM oncekey_inbox_delivery d JOIN oncekey_inbox_event e ON e.id = d.id
WHERE d.target = ? AND d.due_at <= ? ORDER BY d.due_at, d.id LIMIT ?

-- name: hold
UPDATE oncekey_inbox_delivery SET due_at = ?, tries = tries + 1, fence = fence + 1, held_by = ?
WHERE id = ? AND target = ?

-- name: finish
DELETE FROM oncekey_inbox_delivery WHERE id = ? AND target = ? AND fence = ?

-- name: retry
UPDATE oncekey_inbox_delivery SET due_at = ?, held_by = '', status = ?, error = ?
WHERE id = ? AND target = ? AND fence = ?

-- name: bury
INSERT INTO oncekey_inbox_dead (id, target, tries, fence, status, error, order_key, note)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)

-- name: add_attempt
INSERT INTO oncekey_inbox_attempt (event, target, number, at, ms, outcome, status, error, note, actor)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, '')

-- name: hand_back
UPDATE oncekey_inbox_delivery SET due_at = ?, tries = tries - 1, held_by = ''
WHERE id = ? AND target = ? AND fence = ? AND held_by <> ''

-- name: renew
UPDATE oncekey_inbox_delivery SET due_at = ?
WHERE id = ? AND target = ? AND fence = ? AND held_by <> ''

-- name: old_events
-- Of the next few in order of age: which are past their time and finished.
SELECT id, EXISTS (SELECT 1 FROM oncekey_inbox_delivery d WHERE d.id = e.id)
    OR EXISTS (SELECT 1 FROM oncekey_inbox_dead x WHERE x.id = e.id)
FROM oncekey_inbox_event e WHERE id > ? AND id < ? ORDER BY id LIMIT ?

-- name: drop_event
DELETE FROM oncekey_inbox_event WHERE id = ?

-- name: drop_attempts
DELETE FROM oncekey_inbox_attempt WHERE event = ?

-- name: drop_strays
-- Copies that came after their event was removed: its key may be known for longer.
DELETE FROM oncekey_inbox_duplicate WHERE rowid IN (
    SELECT c.rowid FROM oncekey_inbox_duplicate c WHERE c.event < ?
        AND NOT EXISTS (SELECT 1 FROM oncekey_inbox_event e WHERE e.id = c.event) LIMIT ?)

-- name: drop_duplicates
DELETE FROM oncekey_inbox_duplicate WHERE event = ?
