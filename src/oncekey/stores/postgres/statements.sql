-- Statements of the PostgreSQL store. Tables are named without a schema and functions without
-- pg_catalog; both are added when a store has found its schema, so that no search_path and no
-- temporary table can put another in their place. {asked: ...} names what comes from callers, from
-- $2 on: as arrays, so that concurrent calls of one process share a statement, or as plain values
-- for a call alone. Rows come in the order of their keys wherever they are locked, so that two
-- batches can't wait for each other in a circle. {part_...} stands for the part of that name.
--
-- {us} and {now} are the server's clock in micro- and milliseconds, read after the row is locked,
-- and whole milliseconds are cut, never rounded. What a transaction
-- of a caller's has in hand it has locked by an advisory lock: others find that busy instead of
-- waiting for it. {guard} and {told} are for such transactions: what must hold before anything is
-- written, and what the caller is told. {unseen}: not among the rows of 'seen'. {held}
-- and {of_mine}: the records that callers hold, for one or for many.
--
-- Long: every statement on the records, as what one of them does the others must agree with.

-- name: part_standing
-- A record that a claim leaves as it is. What needs no change is answered without a lock or a
-- write, so that there is nothing to sync to disk.
SELECT t.*
FROM asked a
CROSS JOIN LATERAL (
    SELECT r.*, {now} AS now
    FROM oncekey_records r WHERE r.tenant = $1::text AND r.key = a.key AND r.scope = a.scope
    OFFSET 0
) t
WHERE CASE t.state
    WHEN 1 THEN t.now < t.expires_at + $9::bigint OR ($10::bigint > 0 AND t.now < t.purge_at)
    WHEN 0 THEN (t.owner <> a.owner AND t.now < t.lease_until)
        OR ((t.owner = a.owner OR t.now < t.expires_at)
            AND t.fingerprint <> a.fingerprint AND t.fingerprint <> '' AND a.fingerprint <> '')
    ELSE t.now < t.expires_at AND $11::boolean
        AND t.fingerprint <> a.fingerprint AND t.fingerprint <> '' AND a.fingerprint <> ''
    END

-- name: part_new_claim
INSERT INTO oncekey_records AS t
    (tenant, key, scope, state, owner, fence, fingerprint, lease_until, expires_at, purge_at,
     attempts)
SELECT $1::text, o.key, o.scope, 0, o.owner, n.us, o.fingerprint, n.now + $7::bigint,
       n.now + $8::bigint + CASE WHEN $11::boolean THEN 0 ELSE $7::bigint END,
       n.now + greatest(
           $7::bigint, $8::bigint + CASE WHEN $11::boolean THEN 0 ELSE $7::bigint END),
       1
FROM {from} o
CROSS JOIN LATERAL (SELECT us, us / 1000 AS now FROM (SELECT {us} AS us OFFSET 0) c OFFSET 0) n

-- name: part_take
-- Of a record that is there: take it, or count one's own lease from now, or leave it.
ON CONFLICT (tenant, key) DO UPDATE SET
    (state, owner, fence, fingerprint, lease_until, expires_at, purge_at, attempts, takeover,
     answer) = (
    SELECT
        CASE WHEN d.take THEN 0 ELSE t.state END,
        CASE WHEN d.take THEN EXCLUDED.owner ELSE t.owner END,
        CASE WHEN d.take THEN greatest(t.fence + 1, d.us) ELSE t.fence END,
        CASE WHEN d.take AND NOT d.inherit THEN EXCLUDED.fingerprint
             WHEN d.take AND t.fingerprint = '' THEN EXCLUDED.fingerprint
             ELSE t.fingerprint END,
        CASE WHEN d.take OR d.mine THEN d.now + $7::bigint ELSE t.lease_until END,
        d.until,
        CASE WHEN d.take OR d.mine THEN greatest(d.now + $7::bigint, d.until)
             ELSE t.purge_at END,
        CASE WHEN d.take THEN t.attempts + 1 ELSE t.attempts END,
        CASE WHEN d.take THEN t.state = 0 WHEN d.mine THEN false ELSE t.takeover END,
        CASE WHEN d.take THEN NULL ELSE t.answer END
    FROM (
        SELECT c.*, c.take AND $11::boolean AND t.expires_at > c.now AS inherit,
            CASE WHEN c.mine AND NOT $11::boolean
                     THEN greatest(t.expires_at, c.now + $7::bigint + $8::bigint)
                 WHEN NOT c.take OR ($11::boolean AND t.expires_at > c.now) THEN t.expires_at
                 WHEN $11::boolean THEN c.now + $8::bigint
                 ELSE c.now + $7::bigint + $8::bigint END AS until
        FROM (
            SELECT b.*,
                b.same AND t.state = 0 AND t.owner = EXCLUDED.owner AS mine,
                CASE t.state
                    WHEN 1 THEN b.now >= t.expires_at + $9::bigint
                        AND NOT ($10::bigint > 0 AND b.now < t.purge_at)
                    WHEN 0 THEN t.owner <> EXCLUDED.owner AND b.now >= t.lease_until
                        AND (b.now >= t.expires_at OR b.same)
                    ELSE b.now >= t.expires_at OR NOT $11::boolean OR b.same
                END AS take
            FROM (
                SELECT us, us / 1000 AS now,
                    t.fingerprint = EXCLUDED.fingerprint OR t.fingerprint = ''
                        OR EXCLUDED.fingerprint = '' AS same
                FROM (
                    SELECT {us} AS us
                    OFFSET 0
                ) a OFFSET 0
            ) b OFFSET 0
        ) c OFFSET 0
    ) d
)

-- name: part_claimed
t.key, t.state, t.owner, t.fence, t.fingerprint, t.lease_until, t.expires_at, t.attempts,
    t.takeover, t.answer, {now} AS now

-- name: part_reply
key, state, owner, fence, fingerprint, greatest(lease_until - now, 0) AS lease_left,
    now >= expires_at + $9::bigint AS late, attempts, takeover, answer

-- name: claim
-- $1 tenant, then what is asked, $7 lease, $8 ttl, $9 skew, $10 remember (milliseconds), $11 sticky.
-- No row: a transaction has the key in hand, or had it just now; 'look' says which.
WITH asked AS {asked: key bytea, scope text, owner bytea, fingerprint bytea, lock bigint},
seen AS MATERIALIZED ({part_standing}),
taken AS (
    {part_new_claim}
    WHERE CASE WHEN {unseen} THEN pg_try_advisory_xact_lock_shared(o.lock) ELSE false END
    ORDER BY o.key
    {part_take}
    RETURNING {part_claimed}
)
SELECT {part_reply} FROM seen UNION ALL SELECT {part_reply} FROM taken

-- name: claim_new
-- The same for calls of which most are the first of their keys: those are not looked for before.
-- No row: what it means above, or a record that has to be taken over, which 'claim' does.
WITH asked AS {asked: key bytea, scope text, owner bytea, fingerprint bytea, lock bigint},
taken AS (
    {part_new_claim}
    WHERE pg_try_advisory_xact_lock_shared(o.lock)
    ORDER BY o.key
    ON CONFLICT (tenant, key) DO NOTHING
    RETURNING {part_claimed}
), seen AS ({part_standing} AND a.key NOT IN (SELECT taken.key FROM taken))
SELECT {part_reply} FROM seen UNION ALL SELECT {part_reply} FROM taken

-- name: claim_fresh
-- The same for one call, where the last ones were for new keys: it looks for nothing. No row: see
-- 'claim_new'. It is sent what 'claim' is, so that $9 and $10 are here, too.
WITH asked AS {asked: key bytea, scope text, owner bytea, fingerprint bytea, lock bigint}
{part_new_claim}
WHERE ($9::bigint, $10::bigint) IS NOT NULL AND pg_try_advisory_xact_lock_shared(o.lock)
ON CONFLICT (tenant, key) DO NOTHING
RETURNING t.key, t.state, t.owner, t.fence, t.fingerprint, $7::bigint, false, 1, false, NULL::bytea

-- name: claim_known
-- The same for one call, where the last ones were for known keys: it only looks. No row: the key is
-- new, or to be taken, which 'claim' does.
WITH asked AS {asked: key bytea, scope text, owner bytea, fingerprint bytea, lock bigint}
SELECT {part_reply} FROM ({part_standing}) t
WHERE ($7::bigint, $8::bigint) IS NOT NULL AND (SELECT a.lock FROM asked a) IS NOT NULL

-- name: claim_in
-- The same inside a caller's transaction, which has the key in hand from here on. Nothing is taken
-- unless $12 is the store's id and, where the transaction was open before ($13), it sees what others
-- commit meanwhile: we can't begin it anew. Says what must be known of the transaction.
WITH asked AS {asked: key bytea, scope text, owner bytea, fingerprint bytea, lock bigint},
here AS MATERIALIZED (
    SELECT (SELECT store_id FROM oncekey_state) AS store,
        current_setting('transaction_isolation') AS isolation
), seen AS MATERIALIZED ({part_standing}),
open AS MATERIALIZED (
    SELECT a.*, CASE
        WHEN here.store IS DISTINCT FROM $12::uuid THEN false
        WHEN $13::boolean AND here.isolation NOT IN ('read committed', 'read uncommitted')
            THEN false
        ELSE pg_try_advisory_xact_lock(a.lock) END AS free
    FROM asked a, here
    WHERE NOT EXISTS (SELECT FROM seen)
), taken AS (
    {part_new_claim}
    WHERE o.free
    {part_take}
    RETURNING {part_claimed}
), reply AS (
    SELECT {part_reply}, NULL::text AS transaction FROM seen
    UNION ALL SELECT {part_reply}, pg_current_xact_id()::text FROM taken
    UNION ALL
    SELECT key, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM open WHERE NOT free
)
SELECT r.key, r.state, r.owner, r.fence, r.fingerprint, r.lease_left, r.late, r.attempts,
    r.takeover, r.answer, here.store::text, here.isolation, r.transaction
FROM reply r, here

-- name: claim_in_new
-- The same for a key that is most likely new: nothing is looked for before, and all that is not known
-- of a record that was just made is its fence. No row: it is not new, or not to be taken; 'claim_in'
-- says which. It is sent the same, so that $9 and $10 are here, too.
WITH asked AS {asked: key bytea, scope text, owner bytea, fingerprint bytea, lock bigint}
{part_new_claim}
WHERE CASE
    WHEN (SELECT store_id FROM oncekey_state) IS DISTINCT FROM $12::uuid THEN false
    WHEN $13::boolean AND current_setting('transaction_isolation')
        NOT IN ('read committed', 'read uncommitted') THEN false
    WHEN ($9::bigint, $10::bigint) IS NULL THEN false
    ELSE pg_try_advisory_xact_lock(o.lock) END
ON CONFLICT (tenant, key) DO NOTHING
RETURNING t.fence, pg_current_xact_id()::text

-- name: part_marked
-- A key that was seen, for as long as that is remembered.
SELECT a.key
FROM asked a
CROSS JOIN LATERAL (
    SELECT r.state, r.lease_until, r.expires_at, r.purge_at, {now} AS now
    FROM oncekey_records r WHERE r.tenant = $1::text AND r.key = a.key AND r.scope = a.scope
    OFFSET 0
) t
WHERE CASE t.state
    WHEN 1 THEN t.now < t.expires_at + $6::bigint OR ($7::bigint > 0 AND t.now < t.purge_at)
    WHEN 0 THEN t.now < t.lease_until
    ELSE false END

-- name: part_new_mark
INSERT INTO oncekey_records AS t
    (tenant, key, scope, state, owner, fence, fingerprint, lease_until, expires_at, purge_at,
     attempts)
SELECT $1::text, o.key, o.scope, 1, '', (n.now + $5::bigint) * 1000 - 1, '', 0,
       n.now + $5::bigint, n.now + $5::bigint, 1
FROM asked o
CROSS JOIN LATERAL (SELECT {now} AS now OFFSET 0) n

-- name: mark
-- $1 tenant, then what is asked, $5 ttl, $6 skew, $7 remember. No row: see 'claim'.
WITH asked AS {asked: key bytea, scope text, lock bigint},
seen AS MATERIALIZED ({part_marked}),
marked AS (
    {part_new_mark}
    WHERE CASE WHEN {unseen} THEN pg_try_advisory_xact_lock_shared(o.lock) ELSE false END
    ORDER BY o.key
    ON CONFLICT (tenant, key) DO UPDATE SET
        (state, owner, fence, fingerprint, lease_until, expires_at, purge_at, attempts, takeover,
         answer) = (
        SELECT 1, ''::bytea, greatest(t.fence + 1, (n.now + $5::bigint) * 1000 - 1), ''::bytea, 0,
               n.now + $5::bigint, n.now + $5::bigint, 1, false, NULL::bytea
        FROM (SELECT {now} AS now OFFSET 0) n
    )
    WHERE CASE t.state
        WHEN 1 THEN {now} >= t.expires_at + $6::bigint
            AND NOT ($7::bigint > 0 AND {now} < t.purge_at)
        WHEN 0 THEN {now} >= t.lease_until
        ELSE true END
    RETURNING t.key
)
SELECT key, true AS first FROM marked UNION ALL SELECT key, false FROM seen

-- name: mark_new
-- See 'claim_new'.
WITH asked AS {asked: key bytea, scope text, lock bigint},
marked AS (
    {part_new_mark}
    WHERE pg_try_advisory_xact_lock_shared(o.lock)
    ORDER BY o.key
    ON CONFLICT (tenant, key) DO NOTHING
    RETURNING t.key
), seen AS ({part_marked} AND a.key NOT IN (SELECT marked.key FROM marked))
SELECT key, true AS first FROM marked UNION ALL SELECT key, false FROM seen

-- name: part_mine
-- A record that its owner holds, and that is in no transaction's hand.
t.tenant = $1::text AND t.key = a.key AND t.scope = a.scope AND t.owner = a.owner
    AND (a.fence IS NULL OR t.fence = a.fence) AND t.state = 0
    AND {guard} AND pg_try_advisory_xact_lock_shared(a.lock)

-- name: part_held
-- For many: locked in the order in which they are asked for, which is that of their keys, and found
-- by the index whatever the planner thinks of the table's size. A join with what is asked could be
-- planned as a scan. Then each is updated at its place.
, held AS MATERIALIZED (
    SELECT a.*, r.place, r.part
    FROM asked a
    CROSS JOIN LATERAL (
        SELECT t.ctid AS place, t.tableoid AS part FROM oncekey_records t
        WHERE {part_mine} FOR UPDATE OFFSET 0
    ) r
)

-- name: part_at_place
held a WHERE t.tenant = $1::text AND t.key = a.key AND t.ctid = a.place AND t.tableoid = a.part

-- name: part_announced
-- Who waits for a key that was settled is told, by a word that only they know.
told AS (
    DELETE FROM oncekey_waiters w USING settled s
    WHERE w.tenant = $1::text AND w.key = s.key
    RETURNING w.note
), announced AS (
    SELECT count(pg_notify('oncekey', note::text)) FROM told
)

-- name: part_completed
SET state = 1, lease_until = 0, answer = a.answer,
    expires_at = CASE WHEN $10::boolean THEN t.expires_at ELSE {now} + $8::bigint END,
    purge_at = CASE WHEN $10::boolean THEN t.expires_at ELSE {now} + $8::bigint END + $9::bigint

-- name: complete
-- $1 tenant, then what is asked, $8 ttl, $9 skew plus remember, $10 sticky. No row: not held, or a
-- transaction has the key in hand; 'look' says which.
WITH asked AS
    {asked: key bytea, scope text, owner bytea, fence bigint, lock bigint, answer bytea}{held},
settled AS (
    UPDATE oncekey_records t
    {part_completed}
    FROM {of_mine}
    RETURNING t.key
), {part_announced}
SELECT key, true AS held, {told} FROM settled, announced

-- name: complete_alone
-- The same for one call. Whether somebody waits is told: then 'announce' is sent, too.
WITH asked AS
    {asked: key bytea, scope text, owner bytea, fence bigint, lock bigint, answer bytea}
UPDATE oncekey_records t
{part_completed}
FROM {of_mine}
RETURNING t.key, true AS held, {told}, EXISTS (
    SELECT FROM oncekey_waiters w WHERE w.tenant = t.tenant AND w.key = t.key) AS waited

-- name: announce
-- $1 tenant, $2 key
WITH told AS (
    DELETE FROM oncekey_waiters w WHERE w.tenant = $1::text AND w.key = $2::bytea RETURNING w.note
)
SELECT count(pg_notify('oncekey', note::text)) FROM told

-- name: transaction
SELECT pg_current_xact_id()::text

-- name: release
-- $1 tenant, then what is asked; a fence that is NULL is any
WITH asked AS {asked: key bytea, scope text, owner bytea, fence bigint, lock bigint}{held},
settled AS (
    UPDATE oncekey_records t SET state = 2, lease_until = {now}
    FROM {of_mine}
    RETURNING t.key
), {part_announced}
SELECT key, true AS held FROM settled, announced

-- name: renew
-- $1 tenant, then what is asked, $7 lease, $8 ttl, $9 sticky
WITH asked AS {asked: key bytea, scope text, owner bytea, fence bigint, lock bigint}{held}
UPDATE oncekey_records t SET (lease_until, expires_at, purge_at) = (
    SELECT n.lease, n.until, greatest(n.lease, n.until)
    FROM (
        SELECT c.now + $7::bigint AS lease, CASE WHEN $9::boolean THEN t.expires_at
            ELSE greatest(t.expires_at, c.now + $7::bigint + $8::bigint) END AS until
        FROM (SELECT {now} AS now OFFSET 0) c OFFSET 0
    ) n
)
FROM {of_mine}
RETURNING t.key, true AS held

-- name: look
-- Why a call got no row: whether the key is free, and what there is.
WITH asked AS {asked: key bytea, scope text, lock bigint}
SELECT a.key, pg_try_advisory_xact_lock_shared(a.lock) AS free, t.state, t.owner, t.fence
FROM asked a
LEFT JOIN LATERAL (
    SELECT * FROM oncekey_records r
    WHERE r.tenant = $1::text AND r.key = a.key AND r.scope = a.scope OFFSET 0
) t ON true

-- name: read
-- $1 tenant, then what is asked
WITH asked AS {asked: key bytea, scope text}
SELECT t.key, t.state, t.owner, t.fence, t.fingerprint, t.lease_until, t.expires_at, t.purge_at,
       t.attempts, t.answer, {us}
FROM asked a
CROSS JOIN LATERAL (
    SELECT * FROM oncekey_records r
    WHERE r.tenant = $1::text AND r.key = a.key AND r.scope = a.scope OFFSET 0
) t

-- name: write
-- $1 tenant, $2 key, $3 scope, $4 fingerprint, $5 answer, $6 expires_at
INSERT INTO oncekey_records AS t
    (tenant, key, scope, state, owner, fence, fingerprint, lease_until, expires_at, purge_at,
     attempts, answer)
SELECT $1::text, $2::bytea, $3::text, 1, '',
       {now} * 1000, $4::bytea, 0, $6::bigint,
       $6::bigint, 1, $5::bytea
ON CONFLICT (tenant, key) DO UPDATE SET
    state = 1, owner = '', fingerprint = EXCLUDED.fingerprint, lease_until = 0,
    expires_at = EXCLUDED.expires_at, purge_at = EXCLUDED.purge_at, attempts = 1, takeover = false,
    answer = EXCLUDED.answer, fence = greatest(t.fence + 1, EXCLUDED.fence)
RETURNING t.key

-- name: count
-- $1 tenant, $2 key, $3 scope, $4 window. A window begins with the first that is counted in it.
INSERT INTO oncekey_records AS t
    (tenant, key, scope, state, owner, fence, fingerprint, lease_until, expires_at, purge_at,
     attempts)
SELECT $1::text, $2::bytea, $3::text, 1, '', n.now * 1000, '', 0, n.now + $4::bigint,
       n.now + $4::bigint, 1
FROM (SELECT {now} AS now OFFSET 0) n
ON CONFLICT (tenant, key) DO UPDATE SET (expires_at, purge_at, attempts, fence) = (
    SELECT
        CASE WHEN d.runs THEN t.expires_at ELSE EXCLUDED.expires_at END,
        CASE WHEN d.runs THEN t.expires_at ELSE EXCLUDED.expires_at END,
        CASE WHEN d.runs THEN least(t.attempts, 2147483646) + 1 ELSE 1 END,
        greatest(t.fence + 1, EXCLUDED.fence)
    FROM (SELECT t.expires_at > EXCLUDED.expires_at - $4::bigint AS runs) d
)
RETURNING t.attempts, greatest(t.expires_at - {now}, 0)

-- name: now
SELECT {now}

-- name: clear
DELETE FROM oncekey_records WHERE tenant = $1::text

-- name: await_change
-- $1 tenant, $2 key, $3 milliseconds
INSERT INTO oncekey_waiters AS w (tenant, key, until)
VALUES ($1::text, $2::bytea, {now} + $3::bigint)
ON CONFLICT (tenant, key) DO UPDATE SET until = greatest(w.until, EXCLUDED.until)
RETURNING w.note::text

-- name: sweep
-- $1 pages to pass over, $2 cutoff (NULL: now minus grace), $3 grace
WITH size AS MATERIALIZED (
    SELECT max(pg_relation_size(relid)) / current_setting('block_size')::int AS pages
    FROM (SELECT relid FROM pg_partition_tree('oncekey_records')
          UNION ALL SELECT 'oncekey_records'::regclass) parts
), turn AS MATERIALIZED (
    -- Every tenant may write the page: one that can't be is the first.
    SELECT CASE WHEN s.page BETWEEN 0 AND size.pages THEN s.page ELSE 0 END AS page
    FROM oncekey_state s, size WHERE s.only_one FOR UPDATE OF s SKIP LOCKED
), cut AS MATERIALIZED (
    SELECT coalesce($2::bigint, {now} - $3::bigint)
        AS at
), span AS MATERIALIZED (
    SELECT ('(' || page || ',0)')::tid AS low, ('(' || page + $1::bigint || ',0)')::tid AS high
    FROM turn
), dead AS MATERIALIZED (
    SELECT t.tableoid AS part, t.ctid AS place FROM oncekey_records t
    WHERE t.ctid >= (SELECT low FROM span) AND t.ctid < (SELECT high FROM span)
        AND t.purge_at <= (SELECT at FROM cut)
    FOR UPDATE SKIP LOCKED
), gone AS (
    -- By their place, which needs no join; the second condition is for tables in partitions.
    DELETE FROM oncekey_records t
    WHERE t.ctid = ANY (ARRAY(SELECT place FROM dead))
        AND (t.tableoid, t.ctid) IN (SELECT part, place FROM dead)
        AND t.purge_at <= (SELECT at FROM cut)
    RETURNING t.purge_at
), moved AS (
    UPDATE oncekey_state s
    SET page = CASE WHEN turn.page + $1::bigint >= size.pages THEN 0 ELSE turn.page + $1::bigint END
    FROM turn, size WHERE s.only_one
    RETURNING s.page
), unheard AS (
    DELETE FROM oncekey_waiters WHERE until < {now}
    RETURNING 1
)
SELECT (SELECT count(*) FROM gone)::bigint AS removed, (SELECT page FROM turn) AS page,
       (SELECT page FROM moved) AS next_page, (SELECT count(*) FROM unheard)::bigint AS unheard,
       (SELECT at FROM cut) - (SELECT min(purge_at) FROM gone) AS lag

-- name: store_id
SELECT store_id::text FROM oncekey_state WHERE only_one

-- name: create_versions
CREATE TABLE IF NOT EXISTS oncekey_schema (
    version    integer NOT NULL,
    step       text COLLATE "C" NOT NULL CHECK (step IN ('pre', 'post')),
    applied_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (version, step)
)

-- name: lock_versions
SELECT pg_advisory_xact_lock(7953752430551623034)

-- name: versions
SELECT version, step FROM oncekey_schema

-- name: add_version
INSERT INTO oncekey_schema (version, step) VALUES ($1::int, $2::text)

-- name: inspect
-- The schema as it is, in one look: tables, versions, columns, primary key, security, role, and
-- where the tables are: temporary ones, which come first in every search_path, are none of ours.
WITH home AS MATERIALIZED (
    SELECT coalesce((
        SELECT n.nspname
        FROM unnest(current_schemas(false)) WITH ORDINALITY AS p (name, place)
        JOIN pg_catalog.pg_namespace n ON n.nspname = p.name AND n.oid <> pg_my_temp_schema()
        JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid
            AND c.relname IN ('oncekey_records', 'oncekey_state')
        ORDER BY p.place LIMIT 1
    ), current_schema(), 'public')::text AS name
), found AS MATERIALIZED (
    SELECT home.name, to_regclass(format('%I.oncekey_records', home.name)) AS records,
        to_regclass(format('%I.oncekey_waiters', home.name)) AS waiters,
        to_regclass(format('%I.oncekey_state', home.name)) AS state,
        to_regclass(format('%I.oncekey_schema', home.name)) AS versions
    FROM home
)
SELECT f.records IS NOT NULL AS records, f.waiters IS NOT NULL AS waiters,
    f.state IS NOT NULL AS state, f.versions IS NOT NULL AS versions,
    (SELECT array_agg(a.attname || ' ' || format_type(a.atttypid, a.atttypmod)
            || CASE WHEN c.collname = 'C' THEN ' C' ELSE '' END)
     FROM pg_catalog.pg_attribute a LEFT JOIN pg_catalog.pg_collation c ON c.oid = a.attcollation
     WHERE a.attrelid = f.records AND a.attnum > 0 AND NOT a.attisdropped) AS columns,
    (SELECT array_agg(a.attname::text ORDER BY k.place)
     FROM pg_catalog.pg_index i
     CROSS JOIN LATERAL unnest(i.indkey::int[]) WITH ORDINALITY AS k (number, place)
     JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number
     WHERE i.indrelid = f.records AND i.indisprimary) AS primary_key,
    (SELECT relrowsecurity FROM pg_catalog.pg_class WHERE oid = f.records) AS row_security,
    (SELECT bool_or(relpersistence = 'u') FROM pg_catalog.pg_class
     WHERE oid = f.records OR oid IN (SELECT relid FROM pg_partition_tree(f.records))) AS unlogged,
    current_user::text AS role, f.name AS home
FROM found f

-- name: browse
-- $1 tenant, $2 the key to go on after, $3 how many. Answers stay where they are.
SELECT t.key, t.scope, t.state, t.owner, t.fence, t.fingerprint, t.lease_until, t.expires_at,
    t.purge_at, t.attempts, pg_catalog.octet_length(t.answer)
FROM oncekey_records t
WHERE t.tenant = $1::text AND t.key > $2::bytea
ORDER BY t.key LIMIT $3::bigint

-- name: find
-- $1 tenant, $2 key
SELECT t.key, t.scope, t.state, t.owner, t.fence, t.fingerprint, t.lease_until, t.expires_at,
    t.purge_at, t.attempts, pg_catalog.octet_length(t.answer)
FROM oncekey_records t
WHERE t.tenant = $1::text AND t.key = $2::bytea
