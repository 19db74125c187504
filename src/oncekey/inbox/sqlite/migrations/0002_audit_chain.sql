-- Each action is bound to the one before it, and the head says how many there are. What was done
-- before this has number 0, and is bound to nothing.
ALTER TABLE oncekey_inbox_audit ADD COLUMN number INTEGER NOT NULL DEFAULT 0;
ALTER TABLE oncekey_inbox_audit ADD COLUMN before TEXT NOT NULL DEFAULT '';
ALTER TABLE oncekey_inbox_audit ADD COLUMN hash TEXT NOT NULL DEFAULT '';
CREATE TABLE oncekey_inbox_head (
    one  INTEGER NOT NULL PRIMARY KEY,
    head TEXT NOT NULL
);
INSERT INTO oncekey_inbox_head (one, head) VALUES (1, '');
