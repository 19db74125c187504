-- An event's id is the millisecond of its arrival and a count, so that ids are in order of arrival
-- and every table of history is cut by it: a day is dropped, never deleted. No foreign keys, no state
-- column, no jsonb: each was measured, and each cost more than it gave.
CREATE SEQUENCE oncekey_inbox_seq;
CREATE TABLE oncekey_inbox_event (
    id      bigint NOT NULL PRIMARY KEY,
    source  text COLLATE "C" NOT NULL,
    type    text COLLATE "C" NOT NULL,
    key     text COLLATE "C" NOT NULL,
    headers bytea NOT NULL,
    body    bytea NOT NULL
) PARTITION BY RANGE (id);
CREATE TABLE oncekey_inbox_event_rest PARTITION OF oncekey_inbox_event DEFAULT;
-- Unfinished deliveries only. A lease is a later due_at; who waits for an earlier event of its entity
-- is parked at the end of time. Half of each page is free for updates, and dead rows go at once.
CREATE TABLE oncekey_inbox_delivery (
    id        bigint   NOT NULL,
    due_at    bigint   NOT NULL,
    fence     integer  NOT NULL DEFAULT 0,
    tries     integer  NOT NULL DEFAULT 0,
    status    integer  NOT NULL DEFAULT 0,
    target    text COLLATE "C" NOT NULL,
    held_by   text COLLATE "C" NOT NULL DEFAULT '',
    error     text COLLATE "C" NOT NULL DEFAULT '',
    order_key text COLLATE "C",
    PRIMARY KEY (id, target)
) WITH (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0,
    autovacuum_analyze_threshold = 50000
);
CREATE INDEX oncekey_inbox_due ON oncekey_inbox_delivery (target, due_at, id);
CREATE INDEX oncekey_inbox_order ON oncekey_inbox_delivery (target, order_key, id)
    WHERE order_key IS NOT NULL;
CREATE INDEX oncekey_inbox_failing ON oncekey_inbox_delivery (target, status, error, id)
    WHERE error <> '';
CREATE TABLE oncekey_inbox_attempt (
    event   bigint  NOT NULL,
    at      bigint  NOT NULL,
    number  integer NOT NULL,
    ms      integer NOT NULL,
    status  integer NOT NULL,
    target  text COLLATE "C" NOT NULL,
    outcome text COLLATE "C" NOT NULL,
    error   text COLLATE "C" NOT NULL,
    note    text COLLATE "C" NOT NULL,
    actor   text COLLATE "C" NOT NULL
) PARTITION BY RANGE (event);
CREATE INDEX oncekey_inbox_history ON oncekey_inbox_attempt (event);
CREATE TABLE oncekey_inbox_attempt_rest PARTITION OF oncekey_inbox_attempt DEFAULT;
CREATE TABLE oncekey_inbox_duplicate (
    event bigint   NOT NULL,
    at    bigint   NOT NULL,
    same  smallint NOT NULL,
    body  bytea
) PARTITION BY RANGE (event);
CREATE INDEX oncekey_inbox_copies ON oncekey_inbox_duplicate (event);
CREATE TABLE oncekey_inbox_duplicate_rest PARTITION OF oncekey_inbox_duplicate DEFAULT;
CREATE TABLE oncekey_inbox_dead (
    id        bigint  NOT NULL,
    fence     integer NOT NULL,
    tries     integer NOT NULL,
    status    integer NOT NULL,
    target    text COLLATE "C" NOT NULL,
    error     text COLLATE "C" NOT NULL,
    order_key text COLLATE "C",
    note      text COLLATE "C" NOT NULL,
    PRIMARY KEY (id, target)
);
CREATE INDEX oncekey_inbox_buried ON oncekey_inbox_dead (target, status, error, id);
CREATE TABLE oncekey_inbox_minute (
    minute bigint  NOT NULL,
    n      bigint  NOT NULL,
    bucket integer NOT NULL,
    node   text COLLATE "C" NOT NULL,
    kind   text COLLATE "C" NOT NULL,
    name   text COLLATE "C" NOT NULL,
    PRIMARY KEY (minute, node, kind, name, bucket)
) WITH (fillfactor = 70);
CREATE TABLE oncekey_inbox_source (name text COLLATE "C" NOT NULL PRIMARY KEY);
CREATE TABLE oncekey_inbox_target (
    name   text COLLATE "C" NOT NULL PRIMARY KEY,
    status text COLLATE "C" NOT NULL,
    at     bigint NOT NULL,
    actor  text NOT NULL,
    reason text NOT NULL
);
CREATE TABLE oncekey_inbox_rejected (
    id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at     bigint NOT NULL,
    source text NOT NULL,
    cause  text NOT NULL,
    detail text NOT NULL
);
CREATE TABLE oncekey_inbox_audit (
    id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at      bigint NOT NULL,
    actor   text NOT NULL,
    action  text NOT NULL,
    subject text COLLATE "C" NOT NULL,
    detail  text NOT NULL
);
CREATE INDEX oncekey_inbox_subject ON oncekey_inbox_audit (subject, id);
CREATE TABLE oncekey_inbox_bulk (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at       bigint NOT NULL,
    actor    text NOT NULL,
    query    text NOT NULL,
    rate     double precision NOT NULL,
    total    bigint NOT NULL,
    done     bigint NOT NULL,
    state    text COLLATE "C" NOT NULL,
    place    bigint NOT NULL,
    target   text COLLATE "C" NOT NULL,
    moved_at bigint NOT NULL
);
CREATE TABLE oncekey_inbox_note (
    name  text COLLATE "C" NOT NULL PRIMARY KEY,
    value bytea NOT NULL,
    until bigint NOT NULL
);
