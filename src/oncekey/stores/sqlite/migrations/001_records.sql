-- One row a key. The key is a SHA-256 digest; small columns stand before the answer, so that
-- sweeping and deciding never read the pages of a long answer.
CREATE TABLE oncekey_records (
    key         BLOB    NOT NULL PRIMARY KEY,
    purge_at    INTEGER NOT NULL,
    state       INTEGER NOT NULL,
    expires_at  INTEGER NOT NULL,
    lease_until INTEGER NOT NULL,
    fence       INTEGER NOT NULL,
    attempts    INTEGER NOT NULL,
    owner       BLOB    NOT NULL,
    fingerprint BLOB    NOT NULL,
    scope       TEXT    NOT NULL,
    answer      BLOB
) WITHOUT ROWID;
