-- name: create_versions
CREATE TABLE IF NOT EXISTS oncekey_schema (version INTEGER NOT NULL PRIMARY KEY, applied_at INTEGER NOT NULL)

-- name: tables
SELECT name FROM sqlite_master WHERE type = 'table'

-- name: version
SELECT coalesce(max(version), 0) FROM oncekey_schema

-- name: add_version
INSERT INTO oncekey_schema (version, applied_at) VALUES (?, ?)

-- name: columns
SELECT name FROM pragma_table_info('oncekey_records')

-- name: read
SELECT state, owner, fence, fingerprint, lease_until, expires_at, purge_at, attempts, answer
FROM oncekey_records WHERE key = ?

-- name: insert
INSERT INTO oncekey_records
    (key, scope, state, owner, fence, fingerprint, lease_until, expires_at, purge_at, attempts, answer)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO NOTHING

-- name: update
UPDATE oncekey_records
SET state = ?, owner = ?, fence = ?, fingerprint = ?, lease_until = ?, expires_at = ?, purge_at = ?,
    attempts = ?, answer = ?
WHERE key = ?

-- name: mark
INSERT INTO oncekey_records
    (key, scope, state, owner, fence, fingerprint, lease_until, expires_at, purge_at, attempts)
VALUES (?, ?, 1, x'', ?, x'', 0, ?, ?, 1)
ON CONFLICT DO NOTHING

-- name: sweep_end
SELECT key FROM oncekey_records WHERE key > ? ORDER BY key LIMIT 1 OFFSET ?

-- name: sweep_range
DELETE FROM oncekey_records WHERE purge_at <= ? AND key > ? AND key <= ?

-- name: sweep_rest
DELETE FROM oncekey_records WHERE purge_at <= ? AND key > ?

-- name: oldest_sweep_range
SELECT min(purge_at) FROM oncekey_records WHERE purge_at <= ? AND key > ? AND key <= ?

-- name: oldest_sweep_rest
SELECT min(purge_at) FROM oncekey_records WHERE purge_at <= ? AND key > ?

-- name: probe
DELETE FROM oncekey_records WHERE key = x''

-- name: clear
DELETE FROM oncekey_records

-- name: browse
SELECT key, scope, state, owner, fence, fingerprint, lease_until, expires_at, purge_at, attempts,
    length(answer)
FROM oncekey_records WHERE key > ? ORDER BY key LIMIT ?

-- name: find
SELECT key, scope, state, owner, fence, fingerprint, lease_until, expires_at, purge_at, attempts,
    length(answer)
FROM oncekey_records WHERE key = ?
