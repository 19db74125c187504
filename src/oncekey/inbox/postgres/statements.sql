-- name: create_versions
CREATE TABLE IF NOT EXISTS oncekey_inbox_schema (version integer NOT NULL PRIMARY KEY, applied_at bigint NOT NULL)

-- name: tables
SELECT to_regclass('oncekey_records') IS NOT NULL, to_regclass('oncekey_inbox_schema') IS NOT NULL

-- name: lock_versions
SELECT pg_advisory_xact_lock(hashtextextended('oncekey_inbox_schema', 0))

-- name: version
SELECT coalesce(max(version), 0) FROM oncekey_inbox_schema

-- name: add_version
INSERT INTO oncekey_inbox_schema (version, applied_at)
VALUES ($1, (extract(epoch FROM clock_timestamp()) * 1000)::bigint)

-- name: now
SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint

-- name: isolation
SELECT current_setting('transaction_isolation')

-- name: remembered
SELECT answer FROM oncekey_records WHERE tenant = '' AND key = $1

-- name: lock_order
-- Who queues or finishes events of an entity does so alone. Taken in one order, whoever asks.
SELECT pg_advisory_xact_lock(hash)
FROM (SELECT DISTINCT hashtextextended(target || chr(1) || entity, 7) AS hash
      FROM unnest($1::text[], $2::text[]) AS o(target, entity) ORDER BY 1) AS hashes

-- name: ingest
-- The short way: keys that are new. Keys that are known name their event. A key of which this says
-- nothing was taken a moment ago, or has a record that no longer counts: see 'forget'.
-- $1 digests, $2 scopes, $3 sources, $4 types, $5 keys, $6 headers, $7 bodies, $8 fingerprints,
-- $9 how long a key is known; of each route: $10 which event, $11 target, $12 order key.
WITH now AS MATERIALIZED (
    SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS ms
), asked AS MATERIALIZED (
    SELECT a.*, (now.ms << 20) | (nextval('oncekey_inbox_seq') & 1048575) AS id
    FROM now, unnest($1::bytea[], $2::text[], $3::text[], $4::text[], $5::text[], $6::bytea[],
        $7::bytea[], $8::bytea[]) WITH ORDINALITY
        AS a(digest, scope, source, type, key, headers, body, fingerprint, place)
), fresh AS (
    INSERT INTO oncekey_records
        (fence, lease_until, expires_at, purge_at, attempts, state, tenant, key, scope, owner,
         fingerprint, answer)
    SELECT (now.ms + $9::bigint) * 1000 - 1, 0, now.ms + $9::bigint, now.ms + $9::bigint, 1, 1, '',
        o.digest, o.scope, '', o.fingerprint,
        convert_to('j"msg_' || lpad(to_hex(o.id), 16, '0') || '"', 'UTF8')
    FROM (SELECT digest, scope, fingerprint, id FROM asked ORDER BY digest) AS o, now
    ON CONFLICT (tenant, key) DO NOTHING
    RETURNING key AS digest
), kept AS MATERIALIZED (
    SELECT a.* FROM fresh f JOIN asked a ON a.digest = f.digest
), events AS (
    INSERT INTO oncekey_inbox_event (id, source, type, key, headers, body)
    SELECT id, source, type, key, headers, body FROM kept
), deliveries AS (
    INSERT INTO oncekey_inbox_delivery (id, target, due_at, order_key)
    SELECT k.id, r.target, {due_at}, r.order_key
    FROM unnest($10::bigint[], $11::text[], $12::text[]) AS r(place, target, order_key)
    JOIN kept k ON k.place = r.place CROSS JOIN now
    WHERE NOT EXISTS (
        SELECT 1 FROM oncekey_inbox_target t WHERE t.name = r.target AND t.status = 'disabled')
), known AS MATERIALIZED (
    SELECT a.place, r.answer, r.fingerprint, r.fingerprint = a.fingerprint AS same,
        CASE WHEN r.fingerprint <> a.fingerprint THEN a.body END AS body
    FROM asked a CROSS JOIN LATERAL (
        SELECT answer, fingerprint FROM oncekey_records r
        WHERE r.tenant = '' AND r.key = a.digest AND r.state = 1
            AND r.expires_at > (SELECT ms FROM now) AND r.answer IS NOT NULL OFFSET 0
    ) AS r
    WHERE NOT EXISTS (SELECT 1 FROM fresh f WHERE f.digest = a.digest)
), copies AS (
    INSERT INTO oncekey_inbox_duplicate (event, at, same, body)
    SELECT ('x' || encode(substr(k.answer, 7, 16), 'escape'))::bit(64)::bigint, now.ms,
        k.same::int, k.body
    FROM known k, now
)
SELECT place, id, true, NULL::bytea, fingerprint FROM kept
UNION ALL SELECT place, NULL, false, answer, fingerprint FROM known

-- name: add_copies
-- Copies that came in one batch with the event that they are copies of.
INSERT INTO oncekey_inbox_duplicate (event, at, same, body)
SELECT c.event, (extract(epoch FROM clock_timestamp()) * 1000)::bigint, (c.body IS NULL)::int, c.body
FROM unnest($1::bigint[], $2::bytea[]) AS c(event, body)

-- name: part_due_at
now.ms

-- name: part_due_in_order
CASE WHEN r.order_key IS NOT NULL AND (
    row_number() OVER (PARTITION BY r.target, r.order_key ORDER BY k.id) > 1
    OR EXISTS (SELECT 1 FROM oncekey_inbox_delivery o
        WHERE o.target = r.target AND o.order_key = r.order_key)
) THEN 9000000000000000 ELSE now.ms END

-- name: forget
-- Records that stand in the way of a key that is free: past their time, given back, or of nobody.
DELETE FROM oncekey_records WHERE tenant = '' AND key = ANY($1::bytea[])
    AND (state <> 1 OR answer IS NULL
        OR expires_at <= (extract(epoch FROM clock_timestamp()) * 1000)::bigint)

-- name: fetch
-- For each target as many as it has slots, by the index, from a floor on: below it a long snapshot
-- may keep rows that are gone, and every look would pass over them.
-- $1 targets, $2 slots, $3 floors, $4 lease, $5 node.
WITH now AS MATERIALIZED (
    SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS ms
), slots AS (
    SELECT s.target, s.free, s.floor FROM unnest($1::text[], $2::int[], $3::bigint[])
        AS s(target, free, floor)
    WHERE NOT EXISTS (
        SELECT 1 FROM oncekey_inbox_target t WHERE t.name = s.target AND t.status <> 'active')
), due AS MATERIALIZED (
    SELECT d.place, d.id, s.target, d.due_at FROM slots s CROSS JOIN now CROSS JOIN LATERAL (
        SELECT q.ctid AS place, q.id, q.due_at FROM oncekey_inbox_delivery q
        WHERE q.target = s.target AND q.due_at >= s.floor AND q.due_at <= now.ms
        ORDER BY q.due_at, q.id LIMIT s.free FOR UPDATE SKIP LOCKED
    ) AS d
), took AS (
    UPDATE oncekey_inbox_delivery q SET due_at = now.ms + $4::bigint, tries = q.tries + 1,
        fence = q.fence + 1, held_by = $5::text
    FROM now WHERE q.ctid = ANY (ARRAY(SELECT place FROM due))
    RETURNING q.id, q.target, q.tries, q.fence, q.due_at, q.order_key
)
SELECT t.id, t.target, t.tries, t.fence, t.due_at, t.order_key, d.due_at,
    e.source, e.type, e.key, e.headers, e.body
FROM took t JOIN due d ON d.id = t.id AND d.target = t.target CROSS JOIN LATERAL (
    SELECT v.source, v.type, v.key, v.headers, v.body FROM oncekey_inbox_event v
    WHERE v.id = t.id OFFSET 0
) AS e
ORDER BY d.due_at, t.id

-- name: finish
-- $1 events, $2 targets, $3 fences, $4 outcomes, $5 ms, $6 statuses, $7 causes, $8 notes,
-- $9 when to try again. Gives those whose fence was the last.
WITH now AS MATERIALIZED (
    SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS ms
), held AS MATERIALIZED (
    SELECT a.*, q.place, q.tries, q.order_key
    FROM unnest($1::bigint[], $2::text[], $3::int[], $4::text[], $5::int[], $6::int[], $7::text[],
        $8::text[], $9::bigint[]) AS a(id, target, fence, outcome, ms, status, error, note, wait)
    CROSS JOIN LATERAL (
        SELECT d.ctid AS place, d.tries, d.order_key FROM oncekey_inbox_delivery d
        WHERE d.id = a.id AND d.target = a.target AND d.fence = a.fence FOR UPDATE OFFSET 0
    ) AS q
), gone AS (
    DELETE FROM oncekey_inbox_delivery
    WHERE ctid = ANY (ARRAY(SELECT place FROM held WHERE outcome <> 'retry'))
), again AS (
    UPDATE oncekey_inbox_delivery q SET due_at = now.ms + h.wait, held_by = '', status = h.status,
        error = CASE WHEN h.error = '' THEN 'failed' ELSE h.error END
    FROM held h, now WHERE h.outcome = 'retry' AND q.ctid = h.place
), buried AS (
    INSERT INTO oncekey_inbox_dead (id, target, tries, fence, status, error, order_key, note)
    SELECT id, target, tries, fence, status, error, order_key, note FROM held
    WHERE outcome = 'dead'
)
INSERT INTO oncekey_inbox_attempt
    (event, target, number, at, ms, outcome, status, error, note, actor)
SELECT h.id, h.target, h.fence, now.ms, h.ms, h.outcome, h.status, h.error, h.note, ''
FROM held h, now RETURNING event, target, number

-- name: finish_delivered
-- The same for a batch of which all is delivered.
WITH held AS MATERIALIZED (
    SELECT a.*, q.place
    FROM unnest($1::bigint[], $2::text[], $3::int[], $4::int[], $5::int[], $6::text[])
        AS a(id, target, fence, ms, status, note)
    CROSS JOIN LATERAL (
        SELECT d.ctid AS place FROM oncekey_inbox_delivery d
        WHERE d.id = a.id AND d.target = a.target AND d.fence = a.fence FOR UPDATE OFFSET 0
    ) AS q
), gone AS (
    DELETE FROM oncekey_inbox_delivery WHERE ctid = ANY (ARRAY(SELECT place FROM held))
)
INSERT INTO oncekey_inbox_attempt
    (event, target, number, at, ms, outcome, status, error, note, actor)
SELECT h.id, h.target, h.fence, (extract(epoch FROM clock_timestamp()) * 1000)::bigint, h.ms,
    'delivered', h.status, '', h.note, ''
FROM held h RETURNING event, target, number

-- name: promote_all
UPDATE oncekey_inbox_delivery q SET due_at = (extract(epoch FROM clock_timestamp()) * 1000)::bigint
FROM (
    SELECT f.target, f.id FROM (SELECT DISTINCT * FROM unnest($1::text[], $2::text[])) AS o(target, entity)
    CROSS JOIN LATERAL (
        SELECT d.target, d.id FROM oncekey_inbox_delivery d
        WHERE d.target = o.target AND d.order_key = o.entity ORDER BY d.id LIMIT 1
    ) AS f
) AS head
WHERE q.target = head.target AND q.id = head.id AND q.due_at = $3::bigint

-- name: hand_back
UPDATE oncekey_inbox_delivery q SET tries = q.tries - 1, held_by = '',
    due_at = (extract(epoch FROM clock_timestamp()) * 1000)::bigint
FROM unnest($1::bigint[], $2::text[], $3::int[]) AS a(id, target, fence)
WHERE q.id = a.id AND q.target = a.target AND q.fence = a.fence AND q.held_by <> ''
RETURNING q.id, q.target, q.fence

-- name: renew
UPDATE oncekey_inbox_delivery q
SET due_at = (extract(epoch FROM clock_timestamp()) * 1000)::bigint + $4::bigint
FROM unnest($1::bigint[], $2::text[], $3::int[]) AS a(id, target, fence)
WHERE q.id = a.id AND q.target = a.target AND q.fence = a.fence AND q.held_by <> ''
RETURNING q.id, q.target, q.fence

-- name: days
-- The days that there are partitions for, by the number of the day in their names.
SELECT substring(c.relname FROM '_d(\d+)$')::bigint
FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = to_regclass('oncekey_inbox_event') AND c.relname ~ '_d\d+$' ORDER BY 1

-- name: add_day
CREATE TABLE oncekey_inbox_{table}_d{day} PARTITION OF oncekey_inbox_{table}
FOR VALUES FROM ({first}) TO ({end})

-- name: wanted_in
-- Events of a day that are not finished: they move out before the day is dropped.
SELECT count(*) FROM (
    SELECT id FROM oncekey_inbox_delivery WHERE id >= $1 AND id < $2
    UNION SELECT id FROM oncekey_inbox_dead WHERE id >= $1 AND id < $2
    LIMIT 10001
) AS wanted

-- name: lock_day
LOCK TABLE oncekey_inbox_event_d{day}, oncekey_inbox_attempt_d{day}, oncekey_inbox_duplicate_d{day}
IN SHARE ROW EXCLUSIVE MODE

-- name: save_rows
CREATE TEMPORARY TABLE oncekey_saved_{table} ON COMMIT DROP AS
SELECT * FROM oncekey_inbox_{table}_d{day} WHERE {column} IN (
    SELECT id FROM oncekey_inbox_delivery WHERE id >= {first} AND id < {end}
    UNION SELECT id FROM oncekey_inbox_dead WHERE id >= {first} AND id < {end})

-- name: close_day
-- Whoever replays an event of the day reads it first: all of those have ended now.
LOCK TABLE oncekey_inbox_event_d{day} IN ACCESS EXCLUSIVE MODE

-- name: left_out
-- Deliveries that were queued after their events were saved.
SELECT EXISTS (
    SELECT 1 FROM (
        SELECT id FROM oncekey_inbox_delivery WHERE id >= $1 AND id < $2
        UNION ALL SELECT id FROM oncekey_inbox_dead WHERE id >= $1 AND id < $2
    ) AS w WHERE NOT EXISTS (SELECT 1 FROM oncekey_saved_event s WHERE s.id = w.id))

-- name: drop_day
DROP TABLE oncekey_inbox_{table}_d{day}

-- name: put_back
INSERT INTO oncekey_inbox_{table} SELECT * FROM oncekey_saved_{table}

-- name: estimate
SELECT greatest(reltuples, 0)::bigint FROM pg_class WHERE oid = to_regclass($1)

-- name: prune_rest
-- What is in no day's partition, in small steps.
DELETE FROM oncekey_inbox_event_rest WHERE id IN (
    SELECT e.id FROM oncekey_inbox_event_rest e WHERE e.id < $1
        AND NOT EXISTS (SELECT 1 FROM oncekey_inbox_delivery d WHERE d.id = e.id)
        AND NOT EXISTS (SELECT 1 FROM oncekey_inbox_dead x WHERE x.id = e.id)
    LIMIT 1000)
RETURNING id

-- name: prune_history
DELETE FROM oncekey_inbox_{table}_rest h WHERE event < $1
    AND NOT EXISTS (SELECT 1 FROM oncekey_inbox_event e WHERE e.id = h.event)
