-- An event's id is the millisecond of its arrival and a count, so that ids are in order of arrival
-- and every table can be cut by age. Long columns stand last, so that lists never read them.
CREATE TABLE oncekey_inbox_event (
    id      INTEGER PRIMARY KEY,
    source  TEXT NOT NULL,
    type    TEXT NOT NULL,
    key     TEXT NOT NULL,
    headers BLOB NOT NULL,
    body    BLOB NOT NULL
);
-- Unfinished deliveries only. A lease is a later due_at; who waits for an earlier event of its entity
-- is parked at the end of time.
CREATE TABLE oncekey_inbox_delivery (
    id        INTEGER NOT NULL,
    target    TEXT    NOT NULL,
    due_at    INTEGER NOT NULL,
    tries     INTEGER NOT NULL,
    fence     INTEGER NOT NULL,
    order_key TEXT,
    held_by   TEXT    NOT NULL,
    status    INTEGER NOT NULL,
    error     TEXT    NOT NULL,
    PRIMARY KEY (id, target)
) WITHOUT ROWID;
CREATE INDEX oncekey_inbox_due ON oncekey_inbox_delivery (target, due_at, id);
CREATE INDEX oncekey_inbox_order ON oncekey_inbox_delivery (target, order_key, id)
    WHERE order_key IS NOT NULL;
CREATE INDEX oncekey_inbox_failing ON oncekey_inbox_delivery (target, status, error, id)
    WHERE error <> '';
CREATE TABLE oncekey_inbox_attempt (
    event   INTEGER NOT NULL,
    target  TEXT    NOT NULL,
    number  INTEGER NOT NULL,
    at      INTEGER NOT NULL,
    ms      INTEGER NOT NULL,
    outcome TEXT    NOT NULL,
    status  INTEGER NOT NULL,
    error   TEXT    NOT NULL,
    note    TEXT    NOT NULL,
    actor   TEXT    NOT NULL,
    PRIMARY KEY (event, target, number)
) WITHOUT ROWID;
CREATE TABLE oncekey_inbox_dead (
    id        INTEGER NOT NULL,
    target    TEXT    NOT NULL,
    tries     INTEGER NOT NULL,
    fence     INTEGER NOT NULL,
    status    INTEGER NOT NULL,
    error     TEXT    NOT NULL,
    order_key TEXT,
    note      TEXT    NOT NULL,
    PRIMARY KEY (id, target)
) WITHOUT ROWID;
CREATE INDEX oncekey_inbox_buried ON oncekey_inbox_dead (target, status, error, id);
CREATE TABLE oncekey_inbox_duplicate (
    event INTEGER NOT NULL,
    at    INTEGER NOT NULL,
    same  INTEGER NOT NULL,
    body  BLOB
);
CREATE INDEX oncekey_inbox_copies ON oncekey_inbox_duplicate (event, at);
CREATE TABLE oncekey_inbox_minute (
    minute INTEGER NOT NULL,
    node   TEXT    NOT NULL,
    kind   TEXT    NOT NULL,
    name   TEXT    NOT NULL,
    bucket INTEGER NOT NULL,
    n      INTEGER NOT NULL,
    PRIMARY KEY (minute, node, kind, name, bucket)
) WITHOUT ROWID;
CREATE TABLE oncekey_inbox_source (name TEXT NOT NULL PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE oncekey_inbox_target (
    name   TEXT NOT NULL PRIMARY KEY,
    status TEXT NOT NULL,
    at     INTEGER NOT NULL,
    actor  TEXT NOT NULL,
    reason TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE oncekey_inbox_rejected (
    id     INTEGER PRIMARY KEY AUTOINCREMENT,
    at     INTEGER NOT NULL,
    source TEXT NOT NULL,
    cause  TEXT NOT NULL,
    detail TEXT NOT NULL
);
CREATE TABLE oncekey_inbox_audit (
    id      INTEGER PRIMARY KEY AUTOINCREMENT,
    at      INTEGER NOT NULL,
    actor   TEXT NOT NULL,
    action  TEXT NOT NULL,
    subject TEXT NOT NULL,
    detail  TEXT NOT NULL
);
CREATE INDEX oncekey_inbox_subject ON oncekey_inbox_audit (subject, id);
CREATE TABLE oncekey_inbox_bulk (
    id       INTEGER PRIMARY KEY AUTOINCREMENT,
    at       INTEGER NOT NULL,
    actor    TEXT NOT NULL,
    query    TEXT NOT NULL,
    rate     REAL NOT NULL,
    total    INTEGER NOT NULL,
    done     INTEGER NOT NULL,
    state    TEXT NOT NULL,
    place    INTEGER NOT NULL,
    target   TEXT NOT NULL,
    moved_at INTEGER NOT NULL
);
CREATE TABLE oncekey_inbox_note (
    name  TEXT NOT NULL PRIMARY KEY,
    value BLOB NOT NULL,
    until INTEGER NOT NULL
) WITHOUT ROWID;
