"""Verifies and dedups webhooks, and passes each event on to an app in any language, once.

    pip install oncekey gunicorn
    WEBHOOK_SECRET=whsec_... APP_URL=http://127.0.0.1:3000/webhooks gunicorn --threads 8 proxy:app

An event is done with when the app has answered 2xx. Any other answer, and none, is told to the
sender as a 500, and its retry is passed on again.
"""

import os
import urllib.request

from oncekey.adapters.wsgi import WebhookApp
from oncekey.receiver import WebhookEvent, WebhookReceiver
from oncekey.signatures import provider

APP_URL = os.environ.get("APP_URL", "http://127.0.0.1:3000/webhooks")

receiver = WebhookReceiver(
    provider("stripe", secret=os.environ["WEBHOOK_SECRET"]),
    os.environ.get("STORE_URL", "sqlite:///proxy.db"),
)


@receiver.on()
def pass_on(event: WebhookEvent) -> None:
    headers = {
        "Content-Type": event.headers.one("content-type") or "application/octet-stream",
        "Oncekey-Event-Id": event.id,
        "Oncekey-Event-Type": event.type,
        "Oncekey-Sender": event.sender.as_sender_identity(),
    }
    request = urllib.request.Request(APP_URL, event.body, headers)
    with urllib.request.urlopen(request, timeout=20):  # raises for anything but 2xx
        pass


app = WebhookApp(receiver)
