"""A body for every provider in the table, as its documentation shows one, cut to a few fields."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

__all__ = ["BODIES", "Body"]


class Body(NamedTuple):
    """What an event of a provider looks like, without its id and type.

    Attributes:
        type: A type that the provider really sends.
        event: One event; for a batch, one of it.
        around: What surrounds a batch, if it is not the whole body.
        end: Bytes after the JSON, which are signed too.
    """

    type: str
    event: dict[str, Any]
    around: dict[str, Any] = {}
    end: bytes = b""


_ADYEN: Final = {
    "amount": {"currency": "EUR", "value": 1130},
    "eventDate": "2026-11-16T03:10:00+01:00",
    "merchantAccountCode": "TestMerchant",
    "merchantReference": "order-1",
    "originalReference": "",
    "success": "true",
}

_TASK: Final = {  # the envelope of AdCP, without its key and its task's type
    "operation_id": "op_1",
    "task_id": "task_1",
    "status": "completed",
    "timestamp": "2026-11-16T03:10:00Z",
}

BODIES: Final[dict[str, Body]] = {
    "stripe": Body(
        "invoice.paid",
        {"object": "event", "data": {"object": {"id": "in_1", "amount_paid": 1200}}},
    ),
    "github": Body("push", {"ref": "refs/heads/main", "repository": {"full_name": "acme/shop"}}),
    "shopify": Body("orders/create", {"total_price": "12.00", "currency": "EUR"}),
    "slack": Body(
        "app_mention",
        {"type": "event_callback", "event": {"user": "U1", "text": "hello", "channel": "C1"}},
    ),
    "paypal": Body("PAYMENT.SALE.COMPLETED", {"resource": {"amount": {"total": "12.00"}}}),
    "square": Body("payment.updated", {"merchant_id": "M1", "data": {"type": "payment"}}),
    "standard-webhooks": Body("user.created", {"data": {"email": "ada@example.com"}}),
    "svix": Body("user.created", {"data": {"email": "ada@example.com"}}),
    "zendesk": Body("zen:event-type:ticket.created", {"detail": {"subject": "Help"}}),
    "discord": Body(
        "APPLICATION_AUTHORIZED",
        {"version": 1, "type": 1, "event": {"timestamp": "2026-11-16T03:10:00Z"}},
    ),
    "paddle": Body("transaction.completed", {"data": {"status": "completed"}}),
    "mailgun": Body("delivered", {"event-data": {"recipient": "ada@example.com"}}),
    "hubspot": Body(
        "contact.creation",
        {"subscriptionId": 2, "portalId": 3, "occurredAt": 1_794_800_000_000, "objectId": 4},
    ),
    "intercom": Body("user.created", {"type": "notification_event", "data": {"item": {}}}),
    "linear": Body("Issue", {"action": "create", "data": {"title": "Fix it"}}),
    "sendgrid": Body("open", {"email": "ada@example.com"}, end=b"\r\n"),
    "adyen": Body("AUTHORISATION", {"NotificationRequestItem": _ADYEN}, {"live": "false"}),
    "adyen-platform": Body("balancePlatform.transfer.created", {"data": {"amount": 1130}}),
    "sports-stack": Body("score", {"event": {"home": 2, "away": 1}}),
    "adcp": Body("create_media_buy", {**_TASK, "result": {"media_buy_id": "mb_1"}}),
    "adcp-hmac": Body("create_media_buy", {**_TASK, "result": {}}),
    "meta": Body(
        "messages",
        {"id": "1", "changes": [{"value": {"messaging_product": "whatsapp"}}]},
        {"object": "whatsapp_business_account"},
    ),
    "gitlab": Body("Push Hook", {"object_kind": "push", "ref": "refs/heads/main"}),
    "openai": Body("response.completed", {"object": "event", "data": {"id": "resp_1"}}),
    "anthropic": Body("session.status_idled", {"type": "event", "data": {"id": "sesn_1"}}),
    "clerk": Body("user.created", {"object": "event", "data": {"id": "user_1"}}),
    "resend": Body("email.delivered", {"data": {"to": ["ada@example.com"]}}),
    "telegram": Body("message", {"message": {"chat": {"id": 7}, "text": "hello"}}),
    "zoom": Body("meeting.started", {"event_ts": 1_794_800_000_000, "payload": {}}),
    "jira": Body("jira:issue_updated", {"timestamp": 1_794_800_000_000, "issue": {"key": "A-1"}}),
    "bitbucket": Body("repo:push", {"repository": {"full_name": "acme/shop"}}),
    "razorpay": Body("payment.captured", {"entity": "event", "payload": {"payment": {}}}),
    "docusign": Body(
        "envelope-completed", {"generatedDateTime": "2026-11-16T03:10:00.000Z", "data": {}}
    ),
    "quickbooks": Body(
        "qbo.customer.created.v1", {"specversion": "1.0", "intuitentityid": "1", "data": {}}
    ),
    "xero": Body(
        "INVOICE",
        {"tenantId": "t-1", "eventType": "UPDATE", "eventDateUtc": "2026-11-16T03:10:00.000"},
        {"firstEventSequence": 1, "lastEventSequence": 1},
    ),
    "calendly": Body("invitee.created", {"created_at": "2026-11-16T03:10:00.000000Z"}),
    "typeform": Body("form_response", {"form_response": {"form_id": "f1", "answers": []}}),
    "pagerduty": Body("incident.triggered", {"event": {"resource_type": "incident", "data": {}}}),
    "sentry": Body("issue", {"action": "created", "data": {"issue": {"title": "Oops"}}}),
    "vercel": Body("deployment.succeeded", {"createdAt": 1_794_800_000_000, "payload": {}}),
    "notion": Body("page.content_updated", {"entity": {"id": "p-1", "type": "page"}}),
    "woocommerce": Body("order.created", {"status": "processing", "total": "12.00"}),
    "lemon-squeezy": Body("order_created", {"data": {"type": "orders", "id": "1"}}),
    "asana": Body(
        "changed",
        {"resource": {"gid": "1", "resource_type": "task"}, "created_at": "2026-11-16T03:10:00Z"},
    ),
    "paystack": Body("charge.success", {"data": {"amount": 1200, "currency": "NGN"}}),
    "twitch": Body("stream.online", {"subscription": {"status": "enabled"}, "event": {}}),
    "dropbox": Body("", {"list_folder": {"accounts": ["dbid:1"]}}),
    "coinbase-commerce": Body("charge:confirmed", {"attempt_number": 1, "event": {"data": {}}}),
    "google-pubsub": Body("", {"message": {"data": "aGVsbG8="}, "subscription": "projects/p/s"}),
    "plaid": Body("SYNC_UPDATES_AVAILABLE", {"webhook_type": "TRANSACTIONS", "item_id": "i-1"}),
    "aws-sns": Body("Notification", {"Subject": "Hello", "Message": "hello"}),
}
