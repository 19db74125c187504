-- Each action is bound to the one before it, and the head says how many there are. What was done
-- before this has number 0, and is bound to nothing.
ALTER TABLE oncekey_inbox_audit ADD COLUMN number bigint NOT NULL DEFAULT 0;
ALTER TABLE oncekey_inbox_audit ADD COLUMN before text NOT NULL DEFAULT '';
ALTER TABLE oncekey_inbox_audit ADD COLUMN hash text NOT NULL DEFAULT '';
CREATE TABLE oncekey_inbox_head (
    one  bigint NOT NULL PRIMARY KEY,
    head text NOT NULL
);
INSERT INTO oncekey_inbox_head (one, head) VALUES (1, '');
