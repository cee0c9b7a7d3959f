"""Defines the SQL statements of the outbox. `OutboxStatements` holds them for one set of tables.

A table need not have the column `priority`. The statements name it only if the table has it.
"""

# ruff: noqa: S608  (names are checked in the configuration, everything else is a parameter)

import re

from zonerelay.outbox.database.tables import TableNames

INLINE = 16 * 1024
"""A row with at most this many bytes of text, and without attachments, is returned with its claim."""
MAX_PEOPLE = 400 * 1024
"""A row whose addresses have more bytes than this is rejected unread."""

# These are evaluated for each row that is claimed. No value that an application can write may make them fail,
# or no mail would leave. Arrays of several dimensions cannot always be joined to one.
_PEOPLE = " + ".join(
    f"coalesce(octet_length({text}), 0)"
    for text in (
        *(f"array_to_string(m.{name}, ',')" for name in ("to_addresses", "cc_addresses", "bcc_addresses")),
        "m.from_address",
        "m.sender",
    )
)
_TEXTS = f"""
coalesce(octet_length(m.subject), 0) + coalesce(octet_length(m.text_body), 0)
    + coalesce(octet_length(m.html_body), 0)
    + CASE WHEN pg_column_size(m.headers) > {INLINE} THEN pg_column_size(m.headers)
        ELSE coalesce(octet_length(m.headers::text), 0) END"""

_HEAD = """m.id, m.claim_token::text, left(m.zone, 256), m.mailbox_id, coalesce(m.attempts, 0),
    extract(epoch FROM m.created_at)::float8, m.recipient_state::text, <priority>"""
HEAD_COLUMNS = 8

_OWN = ("from_address", "sender", "to_addresses", "cc_addresses", "bcc_addresses")
_MAILBOX_ADDRESS = "(SELECT b.from_address FROM <mailboxes> b WHERE b.id = m.mailbox_id LIMIT 1)"
_PEOPLE_COLUMNS = ", ".join((*(f"CASE WHEN p.ok THEN m.{name} END" for name in _OWN), _MAILBOX_ADDRESS))
PEOPLE = (*_OWN, "mailbox_address")
"""The names of the columns with the addresses of a row and of its mailbox."""
_ROW = f"{_HEAD}, p.ok, {_PEOPLE_COLUMNS}"
_CONTENT = ("m.subject", "m.text_body", "m.html_body", "m.headers::text")


_ZONE = (
    "CASE WHEN m.mailbox_id IS NULL THEN coalesce(nullif(m.zone, ''), {}) ELSE 'mailbox/' || m.mailbox_id END"
)
# The same text as `QueueName.text`.
_QUEUE = f"{_ZONE} || CASE <priority> WHEN 'high' THEN ';high' WHEN 'bulk' THEN ';bulk' ELSE '' END"
_IS_SMALL = f"p.ok AND m.attachments IS NULL AND {_TEXTS} <= {INLINE}"
_WORD = re.compile("<[a-z]+>")
_TAKEN = """m AS (
    UPDATE <table> t SET status = 'processing', claimed_by = $2::uuid, claim_token = gen_random_uuid()
    FROM picked WHERE t.id = picked.id RETURNING t.*
)"""
_CHECKED = f"CROSS JOIN LATERAL (SELECT {_PEOPLE} <= {MAX_PEOPLE} AS ok) p"


class OutboxStatements:
    """The outbox's SQL statements, for tables with the configured names. Below are their templates, with
    names of tables in angle brackets. Call `use` to state whether the table has the column `priority`.
    """

    # $1 limit, $2 session, $3 full queues, $4 default zone, $5 only rows due after '-infinity' (retries)
    claim = f"""
WITH picked AS (
    SELECT m.id FROM <table> m
    WHERE m.status = 'queued' AND coalesce(m.next_retry_at, '-infinity'::timestamptz) <= now()
        AND (NOT $5 OR coalesce(m.next_retry_at, '-infinity'::timestamptz) > '-infinity')
        AND {_QUEUE.format("$4")} <> ALL($3::text[])
    ORDER BY coalesce(m.next_retry_at, '-infinity'::timestamptz), m.id
    LIMIT $1 FOR UPDATE OF m SKIP LOCKED
), {_TAKEN}
SELECT {_ROW}, {_IS_SMALL} AS small,
    {", ".join(f"CASE WHEN {_IS_SMALL} THEN {column} END" for column in _CONTENT)}
FROM m {_CHECKED} ORDER BY m.id"""
    size = (
        f"SELECT {_TEXTS} + coalesce(octet_length(m.attachments::text), 0)::bigint FROM <table> m"
        " WHERE m.id = $1"
    )
    content = (
        f"SELECT {', '.join(_CONTENT)}, convert_to(m.attachments::text, 'UTF8') FROM <table> m"
        " WHERE m.id = $1"
    )
    # A row whose claim was lost has another token, or none. It is not changed then.
    write = """
UPDATE <table> m SET status = k.status, attempts = k.attempts, error_log = k.error_log,
    recipient_state = k.state::jsonb,
    next_retry_at = CASE WHEN k.delay IS NULL THEN NULL WHEN k.delay = 'infinity' THEN 'infinity'
        ELSE clock_timestamp() + k.delay * interval '1 second' END,
    sent_at = CASE WHEN k.status = 'sent' THEN clock_timestamp() ELSE m.sent_at END,
    claimed_by = CASE WHEN k.status = 'processing' THEN m.claimed_by END,
    claim_token = CASE WHEN k.status = 'processing' THEN m.claim_token END
FROM unnest($1::bigint[], $2::uuid[], $3::text[], $4::int[], $5::text[], $6::text[], $7::float8[])
    AS k (id, token, status, attempts, error_log, state, delay)
WHERE m.id = k.id AND m.claim_token = k.token AND m.status = 'processing' RETURNING m.id"""
    one = f"SELECT {_ROW} FROM <table> m {_CHECKED} WHERE m.id = $1 AND m.status IN ('queued', 'processing')"
    # Locks the row as a claim does, so that later writes are fenced in the same way.
    lock = f"""
WITH picked AS (
    SELECT id FROM <table> WHERE id = $1 AND status = 'queued' FOR UPDATE SKIP LOCKED
), {_TAKEN}
SELECT {_ROW} FROM m {_CHECKED}"""
    scan = f"""
SELECT {_ROW} FROM <table> m {_CHECKED}
WHERE m.status IN ('queued', 'processing') AND m.id > $1
    AND ($2::text IS NULL OR {_QUEUE.format("$3")} = $2) ORDER BY m.id LIMIT 200"""
    counts = """
SELECT CASE WHEN mailbox_id IS NULL THEN coalesce(nullif(left(zone, 256), ''), $1) ELSE 'mailbox' END AS z,
    count(*) FILTER (WHERE next_retry_at IS NULL),
    count(*) FILTER (WHERE next_retry_at < 'infinity'),
    count(*) FILTER (WHERE next_retry_at = 'infinity'),
    extract(epoch FROM min(created_at))::float8
FROM <table> WHERE status IN ('queued', 'processing') GROUP BY z LIMIT 1000"""
    figures = """
SELECT status, count(*), extract(epoch FROM clock_timestamp() - min(created_at))::float8,
    extract(epoch FROM clock_timestamp() - min(coalesce(next_retry_at, created_at))
        FILTER (WHERE coalesce(next_retry_at, created_at) <= clock_timestamp()))::float8
FROM <table> WHERE status IN ('queued', 'processing') GROUP BY status
UNION ALL SELECT 'failed', count(*), NULL, NULL FROM <table> WHERE status = 'failed'"""
    sent = "SELECT count(*) FROM <table> WHERE status = 'sent'"
    alive = "SELECT count(*) FROM <relays> WHERE expires > clock_timestamp()"
    next_due = """
SELECT extract(epoch FROM next_retry_at - clock_timestamp())::float8 FROM <table>
WHERE status = 'queued' AND coalesce(next_retry_at, '-infinity'::timestamptz) > now()
    AND next_retry_at < 'infinity'
ORDER BY coalesce(next_retry_at, '-infinity'::timestamptz) LIMIT 1"""
    mailboxes = """
SELECT id, from_address, smtp_host, smtp_port, smtp_tls, smtp_verify, smtp_username,
    smtp_password_encrypted
FROM <mailboxes> WHERE id = ANY($1::bigint[])"""
    register = """
INSERT INTO <relays> (session, name, expires)
VALUES (gen_random_uuid(), $1, clock_timestamp() + $2 * interval '1 second') RETURNING session::text"""
    renew = """
UPDATE <relays> SET expires = clock_timestamp() + $2 * interval '1 second'
WHERE session = $1::uuid RETURNING 1"""
    retire = "DELETE FROM <relays> WHERE session = $1::uuid"
    # As BOUND of the spool: a lease that was written before the server's clock was set back ends in time too.
    bound = """
UPDATE <relays> SET expires = clock_timestamp() + $1 * interval '1 second'
WHERE expires > clock_timestamp() + $1 * interval '1 second'"""
    # $2 is this relay's name. Its earlier session has ended with its process.
    bury = """
DELETE FROM <relays> WHERE session IN (
    SELECT session FROM <relays> WHERE (expires < clock_timestamp() OR name = $2) AND session <> $1::uuid
    FOR UPDATE SKIP LOCKED
) RETURNING name"""
    mine = """
SELECT id, claim_token::text FROM <table> WHERE claimed_by = $1::uuid AND status = 'processing'"""
    give_back = """
UPDATE <table> m SET status = 'queued', claimed_by = NULL, claim_token = NULL
FROM unnest($1::bigint[], $2::uuid[]) AS k (id, token)
WHERE m.id = k.id AND m.claim_token IS NOT DISTINCT FROM k.token AND m.status = 'processing'
RETURNING m.id"""
    reap = """
UPDATE <table> m SET status = 'queued', claimed_by = NULL, claim_token = NULL WHERE id IN (
    SELECT id FROM <table> o WHERE o.status = 'processing'
        AND NOT EXISTS (SELECT 1 FROM <relays> r WHERE r.session = o.claimed_by)
    LIMIT 1000 FOR UPDATE SKIP LOCKED
) RETURNING id"""

    def __init__(self, names: TableNames) -> None:
        self.names = names
        self.use(has_priority=True)

    def use(self, *, has_priority: bool) -> None:
        words = {
            "<priority>": "m.priority" if has_priority else "NULL::text",
            "<table>": self.names.quoted(self.names.messages),
            "<mailboxes>": self.names.quoted(self.names.mailboxes),
            "<relays>": self.names.quoted(self.names.relays),
        }
        for name, template in vars(OutboxStatements).items():
            if isinstance(template, str) and not name.startswith("_"):
                setattr(self, name, _WORD.sub(lambda found: words[found[0]], template))
