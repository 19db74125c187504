"""A webhook receiver: raw bytes in, answer out. Verifies, dedups, runs handlers once."""

from __future__ import annotations

from oncekey.receiver.audit import (
    AuditEntry,
    AuditFile,
    AuditSink,
    AuditTable,
    LogAudit,
    TableAudit,
)
from oncekey.receiver.events import DeadLetter, WebhookEvent, WebhookResponse
from oncekey.receiver.receiver import AsyncWebhookReceiver, WebhookReceiver
from oncekey.receiver.settings import ReceiverSettings, RetentionWarning

__all__ = [
    "AsyncWebhookReceiver",
    "AuditEntry",
    "AuditFile",
    "AuditSink",
    "AuditTable",
    "DeadLetter",
    "LogAudit",
    "ReceiverSettings",
    "RetentionWarning",
    "Settings",
    "TableAudit",
    "WebhookEvent",
    "WebhookReceiver",
    "WebhookResponse",
]

Settings = ReceiverSettings  # the name that it had first
