"""The statements of the store. Each works on arrays of rows, because most of the cost is in their number.

A claim is guarded by its session in every statement that ends it: `mine` says that the caller was handed the
delivery, so that nothing happens when another node has taken it over; without it, an unclaimed delivery
is changed too.
"""

# ruff: noqa: S608  (only constants of this module are put together here; values travel beside)

from __future__ import annotations

_KEYS = "unnest($1::text[], $2::bigint[], $3::text[])"
_SAME = "d.zone = k.zone AND d.message_id = k.message_id AND d.recipient = k.recipient"
_ROW = "d.zone, d.message_id, d.recipient, d.next_attempt, d.held, d.record"

# --- taking mail

ADD = """
WITH m AS (
    INSERT INTO message (id, metadata, body)
    SELECT * FROM unnest($1::bigint[], $2::bytea[], $3::bytea[])
), c AS (
    INSERT INTO chunk (message_id, number, data)
    SELECT * FROM unnest($4::bigint[], $5::integer[], $6::bytea[])
)
INSERT INTO delivery
    (zone, message_id, recipient, domain, created, next_attempt, held, alone, claimed_by, record)
SELECT * FROM unnest(
    $7::text[], $8::bigint[], $9::text[], $10::text[], $11::float8[], $12::float8[], $13::bool[],
    $14::bool[], $15::bigint[], $16::bytea[]
)
"""

# In order, so that two relays that write the same keys do not wait for each other.
KEEP = """
INSERT INTO kept (identity, digest, message_id, until)
SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[], $4::float8[]) AS k (identity) ORDER BY identity
ON CONFLICT (identity) DO UPDATE SET
    digest = excluded.digest, message_id = excluded.message_id, until = excluded.until
WHERE kept.until <= $5
RETURNING identity
"""

KEPT = "SELECT identity, message_id, digest, until FROM kept WHERE identity = ANY($1::text[])"

KEPT_PAGE = """
SELECT identity, message_id, digest, until FROM kept WHERE identity > $1 ORDER BY identity LIMIT 1000
"""

# The time twice: a key may be used again while this waits for its row.
FORGET_KEPT = """
DELETE FROM kept WHERE until <= $1
    AND identity IN (SELECT identity FROM kept WHERE until <= $1 ORDER BY until LIMIT $2)
"""

DROP_CHUNKS = "DELETE FROM chunk WHERE message_id = ANY($1::bigint[])"

ADD_CHUNKS = """
WITH u AS (
    INSERT INTO upload (message_id, session)
    SELECT id, $4 FROM (SELECT DISTINCT unnest($1::bigint[]) AS id) ids ON CONFLICT DO NOTHING
)
INSERT INTO chunk (message_id, number, data) SELECT * FROM unnest($1::bigint[], $2::integer[], $3::bytea[])
"""

END_UPLOADS = "DELETE FROM upload WHERE message_id = ANY($1::bigint[]) AND session = $2 RETURNING message_id"

UPLOADS = "SELECT message_id FROM upload WHERE session = $1"

DROP_UPLOADS = f"""
WITH u AS ({END_UPLOADS})
DELETE FROM chunk WHERE message_id IN (SELECT message_id FROM u)
"""

FORGET_MESSAGES = """
WITH m AS (DELETE FROM message WHERE id = ANY($1::bigint[])),
    c AS (DELETE FROM chunk WHERE message_id = ANY($1::bigint[])),
    u AS (DELETE FROM upload WHERE message_id = ANY($1::bigint[]))
DELETE FROM delivery d USING (SELECT DISTINCT unnest($2::text[]) AS zone) z
WHERE d.zone = z.zone AND d.message_id = ANY($1::bigint[])
"""

# --- outcomes

FINISH = f"""
WITH k AS (
    SELECT * FROM unnest($1::text[], $2::bigint[], $3::text[], $4::bool[])
        AS k (zone, message_id, recipient, mine)
), gone AS (
    DELETE FROM delivery d USING k
    WHERE {_SAME} AND (d.claimed_by = $5 OR (d.claimed_by IS NULL AND NOT k.mine))
    RETURNING d.zone, d.message_id, d.recipient, d.next_attempt, d.held, d.alone
), m AS (
    DELETE FROM message WHERE id IN (SELECT message_id FROM gone WHERE alone)
), c AS (
    DELETE FROM chunk WHERE message_id IN (SELECT message_id FROM gone WHERE alone)
), n AS (
    UPDATE node SET last_id = $6 WHERE session = $5 AND last_id < $6
)
SELECT * FROM gone
"""

LOCK_MESSAGES = "SELECT id FROM message WHERE id = ANY($1::bigint[]) ORDER BY id FOR UPDATE"

CLOSE_MESSAGES = """
WITH m AS (
    DELETE FROM message WHERE id = ANY($1::bigint[])
        AND NOT EXISTS (SELECT FROM delivery d WHERE d.message_id = id AND NOT d.alone)
    RETURNING id
), c AS (
    DELETE FROM chunk WHERE message_id IN (SELECT id FROM m)
)
SELECT id FROM m
"""

POSTPONE = f"""
WITH k AS (
    SELECT * FROM unnest(
        $1::text[], $2::bigint[], $3::text[], $4::bool[], $6::float8[], $7::bool[], $8::bytea[]
    ) AS k (zone, message_id, recipient, mine, next_attempt, held, record)
), old AS (
    SELECT d.zone, d.message_id, d.recipient, d.next_attempt, d.held FROM delivery d JOIN k ON {_SAME}
    WHERE d.claimed_by = $5 OR (d.claimed_by IS NULL AND NOT k.mine)
    FOR UPDATE OF d
)
UPDATE delivery d
SET next_attempt = k.next_attempt, held = k.held, record = k.record, claimed_by = NULL, parked = false
FROM k JOIN old USING (zone, message_id, recipient)
WHERE {_SAME}
RETURNING d.zone, d.message_id, d.recipient, old.next_attempt, old.held
"""

# --- handing out


def _claim(condition: str, order: str) -> str:
    """Claim up to $3 rows; those of a domain in $4 are parked instead."""
    return f"""
WITH k AS (
    SELECT zone, message_id, recipient, domain = ANY($4::text[]) AS passed FROM delivery
    WHERE zone = $1 AND claimed_by IS NULL AND NOT held AND NOT parked AND {condition}
    ORDER BY {order} LIMIT $3 FOR UPDATE SKIP LOCKED
)
UPDATE delivery d SET claimed_by = CASE WHEN passed THEN NULL ELSE $2::bigint END, parked = passed
FROM k WHERE {_SAME}
RETURNING {_ROW}, k.passed
"""


CLAIM_FRESH = _claim("next_attempt <= 0", "message_id, recipient")
CLAIM_NEW = _claim("next_attempt <= 0 AND message_id >= $5", "message_id, recipient")
CLAIM_DUE = _claim("next_attempt > 0 AND next_attempt <= $5", "next_attempt, message_id, recipient")

CLAIM_PARKED = f"""
WITH k AS (
    SELECT zone, message_id, recipient FROM delivery
    WHERE zone = $1 AND claimed_by IS NULL AND parked AND domain = $4 AND NOT held
    ORDER BY message_id, recipient LIMIT $3 FOR UPDATE SKIP LOCKED
)
UPDATE delivery d SET claimed_by = $2, parked = false FROM k WHERE {_SAME} RETURNING {_ROW}, false
"""


def _distinct(column: str, condition: str = "true") -> str:
    """The values of a column that an index begins with, in order, without a look at each row."""
    return f"""
WITH RECURSIVE found AS (
    (SELECT {column} FROM delivery WHERE {condition} ORDER BY {column} LIMIT 1)
    UNION ALL
    SELECT (
        SELECT d.{column} FROM delivery d WHERE {condition} AND d.{column} > found.{column}
        ORDER BY d.{column} LIMIT 1
    ) FROM found WHERE found.{column} IS NOT NULL
)
SELECT {column} FROM found WHERE {column} IS NOT NULL"""


PARKED_DOMAINS = _distinct("domain", "zone = $1 AND claimed_by IS NULL AND parked") + " LIMIT 10000"

NEXT_DUE = """
SELECT next_attempt FROM delivery
WHERE zone = $1 AND claimed_by IS NULL AND NOT held AND NOT parked AND next_attempt > 0
ORDER BY next_attempt LIMIT 1
"""

PARK = f"""
UPDATE delivery d SET claimed_by = NULL, parked = true FROM {_KEYS} AS k (zone, message_id, recipient)
WHERE {_SAME} AND d.claimed_by = $4
"""

CLAIMED = f"SELECT {_ROW} FROM delivery d WHERE claimed_by = $1"

CLAIMED_KEYS = "SELECT zone, message_id, recipient FROM delivery WHERE claimed_by = $1"

GIVE_BACK = f"""
UPDATE delivery d SET claimed_by = NULL FROM {_KEYS} AS k (zone, message_id, recipient)
WHERE {_SAME} AND d.claimed_by = $4
"""

# --- operators

FOR_UPDATE = f"""
SELECT {_ROW}, d.claimed_by, d.alone FROM delivery d
JOIN {_KEYS} AS k (zone, message_id, recipient) ON {_SAME}
ORDER BY d.message_id, d.zone, d.recipient FOR UPDATE OF d
"""

REMOVE = f"DELETE FROM delivery d USING {_KEYS} AS k (zone, message_id, recipient) WHERE {_SAME}"

REMOVE_MESSAGES = """
WITH m AS (DELETE FROM message WHERE id = ANY($1::bigint[]))
DELETE FROM chunk WHERE message_id = ANY($1::bigint[])
"""

REWRITE = f"""
UPDATE delivery d
SET next_attempt = k.next_attempt, held = k.held, record = k.record, claimed_by = k.claimed_by,
    parked = false, zone = k.goes
FROM unnest(
    $1::text[], $2::bigint[], $3::text[], $4::float8[], $5::bool[], $6::bytea[], $7::bigint[], $8::text[]
) AS k (zone, message_id, recipient, next_attempt, held, record, claimed_by, goes)
WHERE {_SAME}
"""

# --- reading

MESSAGE = "SELECT metadata, body FROM message WHERE id = $1"
CHUNKS = "SELECT number, data FROM chunk WHERE message_id = $1 AND number BETWEEN $2 AND $3 ORDER BY number"
HAS_MESSAGE = "SELECT 1 FROM message WHERE id = $1"

SCAN = f"""
SELECT {_ROW} FROM delivery d WHERE (d.zone, d.message_id, d.recipient) > ($1, $2, $3)
ORDER BY d.zone, d.message_id, d.recipient LIMIT $4
"""
SCAN_ZONE = f"""
SELECT {_ROW} FROM delivery d WHERE d.zone = $1 AND (d.message_id, d.recipient) > ($2, $3)
ORDER BY d.message_id, d.recipient LIMIT $4
"""

OF_MESSAGE = f"SELECT {_ROW} FROM delivery d WHERE d.zone = ANY($1::text[]) AND d.message_id = $2"

ZONES = _distinct("zone")

_FREE = "SELECT FROM delivery d WHERE d.zone = found.zone AND claimed_by IS NULL"
BUSY = f"""
{ZONES} AND (
    EXISTS ({_FREE} AND NOT held AND NOT parked AND next_attempt <= 0)
    OR EXISTS ({_FREE} AND NOT held AND NOT parked AND next_attempt > 0 AND next_attempt <= $1)
    OR EXISTS ({_FREE} AND parked)
)
"""

OLDEST = (
    "SELECT created FROM delivery WHERE zone = $1 AND created <= $2 ORDER BY message_id, recipient LIMIT 1"
)

COUNTS = """
SELECT zone,
    count(*) FILTER (WHERE NOT held AND next_attempt <= 0),
    count(*) FILTER (WHERE NOT held AND next_attempt > 0),
    count(*) FILTER (WHERE held)
FROM delivery GROUP BY zone
"""

LAST_ID = "SELECT greatest((SELECT max(id) FROM message), (SELECT max(last_id) FROM node))"

# --- nodes

SERVER = """
SELECT current_setting('server_version_num')::int, pg_is_in_recovery(), current_setting('fsync'),
    current_setting('full_page_writes'), current_setting('synchronous_commit')
"""

HAS_MARK = "SELECT to_regclass('queue_mark') IS NOT NULL"
MARK = "SELECT mark FROM queue_mark"
SET_MARK = "INSERT INTO queue_mark (mark) VALUES ($1) ON CONFLICT DO NOTHING"

TAKE_NUMBER = "SELECT pg_try_advisory_lock(hashtext($1), $2)"

REGISTER = """
INSERT INTO node (node, session, expires)
VALUES ($1, nextval('node_session'), clock_timestamp() + $2 * interval '1 second')
ON CONFLICT (node) DO UPDATE SET session = excluded.session, expires = excluded.expires
RETURNING session
"""

RENEW = """
UPDATE node SET expires = clock_timestamp() + $2 * interval '1 second', last_id = greatest(last_id, $3)
WHERE session = $1 RETURNING session
"""

OTHERS = "SELECT count(*) FROM node WHERE session IS NOT NULL AND session <> $1"

RETIRE = "UPDATE node SET session = NULL, last_id = greatest(last_id, $2) WHERE session = $1"

BOUND = """
UPDATE node SET expires = clock_timestamp() + $1 * interval '1 second'
WHERE expires > clock_timestamp() + $1 * interval '1 second'
"""

REAP = """
UPDATE node SET session = NULL WHERE node IN (
    SELECT node FROM node WHERE expires < clock_timestamp() AND session <> $1 FOR UPDATE SKIP LOCKED
) RETURNING node
"""

_LIVE = "(SELECT session FROM node WHERE session IS NOT NULL)"
ORPHANS = f"{_distinct('claimed_by', 'claimed_by IS NOT NULL')} AND claimed_by NOT IN {_LIVE}"

FREE = f"""
WITH k AS (
    SELECT zone, message_id, recipient FROM delivery WHERE claimed_by = $1 LIMIT $2 FOR UPDATE SKIP LOCKED
)
UPDATE delivery d SET claimed_by = NULL FROM k WHERE {_SAME} RETURNING d.zone
"""

DROP_DEAD_UPLOADS = f"""
WITH u AS (DELETE FROM upload WHERE session NOT IN {_LIVE} RETURNING message_id)
DELETE FROM chunk WHERE message_id IN (SELECT message_id FROM u)
"""

TELL = "SELECT pg_notify($1, text) FROM unnest($2::text[]) AS text"
