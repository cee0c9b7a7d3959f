"""The reasons for which the relay refuses a connection, a command or a message."""

import enum

import msgspec

from zonerelay.model.reply import Reply


class Reason(enum.StrEnum):
    """The reason of a refusal, which is the label `reason` of a metric and the field `reason` of the event
    `refused`. The list is fixed.
    """

    ACCESS = "access"
    ADDRESS = "address"
    AUTH = "auth"
    AUTH_NEEDED = "auth-needed"
    AUTH_FAILURE = "auth-trouble"
    BARE_LINE_ENDS = "bare-line-ends"
    BEING_STORED = "being-stored"
    CLIENT_CONNECTIONS = "client-connections"
    CLIENT_LEFT = "client-left"
    COMMANDS = "commands"
    CONNECTIONS = "connections"
    DATA_RATE = "data-rate"
    ERRORS = "errors"
    HEADER_CONTROLS = "header-controls"
    HEADER_SIZE = "header-size"
    IDEMPOTENCY = "idempotency"
    IDEMPOTENCY_KEY = "idempotency-key"
    IDLE = "idle-timeout"
    LOOP = "loop"
    MEMORY = "memory"
    NETWORK_CONNECTIONS = "network-connections"
    NOT_OFFERED = "not-offered"
    OTHER_PROTOCOL = "other-protocol"
    PARAMETER = "parameter"
    PIPELINING = "pipelining"
    POLICY = "policy"
    PROXY = "proxy"
    QUOTA = "quota"
    RECIPIENTS = "recipients"
    RELAY = "relay"
    SENDER = "sender"
    SENDER_DOMAIN = "sender-domain"
    SEQUENCE = "sequence"
    SHUTDOWN = "shutdown"
    SIZE = "size"
    SMTPUTF8 = "smtputf8"
    SRS = "srs"
    SRS_GUESSES = "srs-guesses"
    STORE = "store"
    STORE_FULL = "store-full"
    SUSPENDED = "suspended"
    SYNTAX = "syntax"
    TLS = "tls"
    TLS_NEEDED = "tls-needed"
    TRANSACTION_TIME = "transaction-timeout"
    LOCAL_ERROR = "trouble"
    UNKNOWN_COMMAND = "unknown-command"
    USER = "user"


class Refusal(msgspec.Struct, frozen=True):
    """The rejection of a connection, a command or a message. `reply` is sent to an SMTP client. `retry_after`
    is in seconds, or 0.0 if it is not known. `quota` names the user's exhausted quota, if that is the reason.
    """

    reason: Reason
    reply: Reply
    retry_after: float = 0.0
    quota: str = ""
