-- What is announced when a key is settled: a word that says something only to those who asked. A
-- channel is open to every role of the database, and a key's digest can be checked against guesses.
ALTER TABLE oncekey_waiters ADD COLUMN note uuid NOT NULL DEFAULT gen_random_uuid();
