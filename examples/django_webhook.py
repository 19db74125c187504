"""A whole Django project in one file: every webhook event makes one payment.

    pip install "oncekey[django]"
    WEBHOOK_SECRET=whsec_... python django_webhook.py runserver
    WEBHOOK_SECRET=whsec_... gunicorn --workers 4 django_webhook:application

Stripe's deliveries come to /hooks/stripe. The payment, an ORM model, and the mark "handled" are
committed in one transaction of Django's own connection. CSRF checks and ATOMIC_REQUESTS are on, as
in a real project: the view takes care of both.
"""

import os
import sys
from pathlib import Path
from typing import Any

import django
from django.conf import settings
from django.core.management import execute_from_command_line
from django.core.wsgi import get_wsgi_application
from django.db import connection, models
from django.http import HttpRequest, JsonResponse
from django.urls import path

from oncekey.adapters.django import webhook_view
from oncekey.receiver import WebhookEvent, WebhookReceiver
from oncekey.signatures import provider

DATABASE = Path(os.environ.get("DATABASE", "shop.sqlite3")).absolute()

if not settings.configured:  # a real project has a settings module
    settings.configure(
        ALLOWED_HOSTS=["127.0.0.1", "localhost"],
        DATABASES={
            "default": {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": DATABASE,
                "ATOMIC_REQUESTS": True,
            }
        },
        MIDDLEWARE=[
            "django.middleware.common.CommonMiddleware",
            "django.middleware.csrf.CsrfViewMiddleware",
        ],
        ROOT_URLCONF=__name__,
        SECRET_KEY=os.environ.get("DJANGO_SECRET_KEY", "only-for-this-example"),
        USE_TZ=True,
    )
    django.setup()


class Payment(models.Model):
    event = models.TextField()
    cents = models.IntegerField()

    class Meta:
        app_label = "shop"


def make_table() -> None:
    """What migrations do in a real project."""
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE IF NOT EXISTS shop_payment"
            " (id integer PRIMARY KEY, event text NOT NULL, cents integer NOT NULL)"
        )
    connection.close()


receiver = WebhookReceiver(
    provider("stripe", secret=os.environ["WEBHOOK_SECRET"]),
    f"sqlite:///{DATABASE}",  # the database that Django uses; with PostgreSQL its URL
    transactional=True,
    on=connection,
)


@receiver.on("invoice.paid")
def paid(event: WebhookEvent, tx: Any) -> None:
    cents = event.payload["data"]["object"]["amount_paid"]
    Payment.objects.create(event=event.id, cents=cents)


def total(request: HttpRequest) -> JsonResponse:
    """All that was paid."""
    return JsonResponse(Payment.objects.aggregate(cents=models.Sum("cents")))


urlpatterns = [path("hooks/stripe", webhook_view(receiver)), path("total", total)]

make_table()
application = get_wsgi_application()

if __name__ == "__main__":
    execute_from_command_line(sys.argv)
