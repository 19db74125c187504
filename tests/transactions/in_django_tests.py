"""A receiver under Django's test database, as ``docs/howto/receive-webhooks.md`` has it.

Run by test_told.py in a process of its own, as settings are for a whole process. Its arguments are
the database's file and the tests' file; without the second Django tests in memory.
"""

from __future__ import annotations

import sys
from typing import Any

import django
from django.conf import settings


def receive() -> list[tuple[int, str]]:
    """Receive two copies, as a TestCase does: inside of a transaction."""
    from django.db import connection, transaction

    from oncekey.receiver import WebhookReceiver
    from oncekey.signatures import provider
    from oncekey.testing import sample

    stripe = provider("stripe", secret="whsec_test")
    receiver = WebhookReceiver(
        stripe,
        f"sqlite:///{settings.DATABASES['default']['NAME']}" if len(sys.argv) > 2 else sys.argv[1],
        transactional=True,
        on=connection,
    )

    @receiver.on("invoice.paid")
    def paid(event: Any, tx: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO orders VALUES (%s)", [event.id])

    delivery = sample(stripe, type="invoice.paid")
    with transaction.atomic():
        answers = [receiver.receive(*delivery) for _ in range(2)]
        transaction.set_rollback(True)
    receiver.close()
    return [(one.status, one.outcome) for one in answers]


def main(file: str, *test: str) -> None:
    """Set up the test database, and receive in two tests."""
    database: dict[str, Any] = {"ENGINE": "django.db.backends.sqlite3", "NAME": file}
    if test:
        database["TEST"] = {"NAME": test[0]}
    settings.configure(DATABASES={"default": database}, INSTALLED_APPS=[])
    django.setup()
    from django.db import connection

    connection.creation.create_test_db(verbosity=0)
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE orders (event text)")
    print(receive(), receive())
    connection.creation.destroy_test_db(file, verbosity=0)


if __name__ == "__main__":
    sys.argv[1] = sys.argv[1] if len(sys.argv) > 2 else f"sqlite:///{sys.argv[1]}"
    main(sys.argv[1].removeprefix("sqlite:///"), *sys.argv[2:])
