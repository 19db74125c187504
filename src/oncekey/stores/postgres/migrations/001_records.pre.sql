-- One row a key. Keys are SHA-256 digests over scope and name; times are milliseconds since 1970.
-- No index but the primary key: records are settled by HOT updates in the room that fillfactor
-- leaves, and swept by walking the table's pages.
CREATE TABLE oncekey_records (
    fence       bigint   NOT NULL,
    lease_until bigint   NOT NULL,
    expires_at  bigint   NOT NULL,
    purge_at    bigint   NOT NULL,
    attempts    integer  NOT NULL,
    state       smallint NOT NULL CHECK (state IN (0, 1, 2)),
    takeover    boolean  NOT NULL DEFAULT false,
    tenant      text COLLATE "C" NOT NULL DEFAULT '',
    key         bytea    NOT NULL CHECK (octet_length(key) = 32),
    scope       text COLLATE "C" NOT NULL,
    owner       bytea    NOT NULL,
    fingerprint bytea    NOT NULL,
    answer      bytea,
    PRIMARY KEY (tenant, key)
) WITH (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.1,
    autovacuum_vacuum_cost_delay = 1
);

-- Who waits for a key's outcome, so that it is announced only to somebody. Lost in a crash of the
-- server, which costs those who wait a look at the record.
CREATE UNLOGGED TABLE oncekey_waiters (
    until  bigint NOT NULL,
    tenant text COLLATE "C" NOT NULL DEFAULT '',
    key    bytea  NOT NULL,
    PRIMARY KEY (tenant, key)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);

-- One row: who this store is, so that a connection to another database is told from one to this,
-- and the page at which the next step of sweeping starts. Whoever holds the row sweeps.
CREATE TABLE oncekey_state (
    only_one boolean NOT NULL PRIMARY KEY DEFAULT true CHECK (only_one),
    page     bigint  NOT NULL DEFAULT 0,
    store_id uuid    NOT NULL DEFAULT gen_random_uuid()
) WITH (fillfactor = 10);

INSERT INTO oncekey_state DEFAULT VALUES;
