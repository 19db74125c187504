"""Django's own middleware in front of guarded views, called in a process of its own.

    python -m tests.adapters.parsed_django FOLDER

Prints what was answered, as JSON.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any

TOKEN = "t" * 32
urlpatterns: list[Any] = []


def configure(folder: Path) -> None:
    import django
    from django.conf import settings

    settings.configure(
        ALLOWED_HOSTS=["a.example", "b.example", "proxy"],
        DATABASES={
            "default": {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": str(folder / "shop.db"),
            }
        },
        INSTALLED_APPS=[
            "django.contrib.contenttypes",
            "django.contrib.auth",
            "django.contrib.sessions",
            "rest_framework",
        ],
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.middleware.csrf.CsrfViewMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
        ],
        LOGGING_CONFIG=None,
        ROOT_URLCONF="tests.adapters.parsed_django",
        SECRET_KEY="shop",
        USE_TZ=True,
        USE_X_FORWARDED_HOST=True,
    )
    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)


def told(reply: Any) -> str:
    replayed = " replayed" if reply.headers.get("Idempotent-Replayed") == "true" else ""
    return f"{reply.status_code}{replayed}"


def forms() -> dict[str, list[str]]:
    """Uploads whose form Django's check of CSRF tokens has parsed before the view."""
    from django.core.files.uploadedfile import SimpleUploadedFile
    from django.http import JsonResponse
    from django.test import Client
    from django.urls import path

    from oncekey.adapters.django import idempotent

    @idempotent("memory://")
    def upload(request: Any) -> Any:
        assert request.POST["note"]
        return JsonResponse({"size": len(request.FILES["file"].read())}, status=201)

    @idempotent("memory://")
    async def aupload(request: Any) -> Any:
        return JsonResponse({"size": len(request.FILES["file"].read())}, status=201)

    urlpatterns.extend([path("upload", upload), path("aupload", aupload)])
    client = Client(enforce_csrf_checks=True)
    client.cookies["csrftoken"] = TOKEN

    def send(where: str, note: str, content: bytes) -> str:
        form = {"csrfmiddlewaretoken": TOKEN, "note": note}
        file = SimpleUploadedFile("invoice", content)
        headers = {"Idempotency-Key": "k", "Authorization": "ann", "Host": "proxy"}
        return told(client.post(f"/{where}", {**form, "file": file}, headers=headers))

    return {
        where: [
            send(where, "a", b"12"),
            send(where, "a", b"12"),
            send(where, "a", b"13"),
            send(where, "b", b"12"),
        ]
        for where in ("upload", "aupload")
    }


class Machine:
    """A caller that is no user of the database."""

    is_authenticated = True
    pk = 1


def users() -> dict[str, Any]:
    """Who a guard with ``by_user`` takes for the caller."""
    from django.contrib.auth.models import User
    from django.test import RequestFactory
    from django.utils.functional import SimpleLazyObject
    from rest_framework.authentication import BaseAuthentication
    from rest_framework.decorators import api_view, authentication_classes
    from rest_framework.response import Response

    from oncekey import MemoryBackend
    from oncekey.adapters.django import by_user, idempotent

    ann = User.objects.create_user("ann", id=1)

    class Either(BaseAuthentication):
        def authenticate(self, request: Any) -> Any:
            return (Machine() if "X-Machine" in request.headers else ann), None

    @api_view(["POST"])
    @authentication_classes([Either])
    @idempotent("memory://", scope=by_user)
    def charge(request: Any) -> Any:
        return Response(type(request.user).__name__, status=201)

    def pay(headers: dict[str, str]) -> str:
        headers = {"Idempotency-Key": "k", "Host": "proxy", **headers}
        reply = charge(RequestFactory().post("/charge", headers=headers))
        return f"{told(reply)} {reply.content.decode()}"

    seen: dict[str, Any] = {"classes": [pay({}), pay({"X-Machine": "1"}), pay({})]}

    @idempotent(MemoryBackend(), scope=by_user)
    async def acharge(request: Any) -> Any:
        from django.http import HttpResponse

        return HttpResponse(status=201)

    bob = User.objects.create_user("bob", id=2)

    async def apay(user: Any, session: Any) -> str:
        """As a middleware leaves it that takes users from tokens, not from the session."""
        request: Any = RequestFactory().post(
            "/charge", headers={"Idempotency-Key": "a", "Host": "proxy"}
        )
        request.user = user

        async def auser() -> Any:
            return session

        request.auser = auser
        return told(await acharge(request))

    async def all_of_them() -> list[str]:
        lazy = SimpleLazyObject(lambda: User.objects.get(pk=2))
        return [await apay(ann, ann), await apay(bob, ann), await apay(lazy, ann)]

    seen["session"] = asyncio.run(all_of_them())
    seen["names"] = [by_user(type("R", (), {"user": user})()) for user in (ann, bob, Machine())]
    return seen


def hosts() -> list[str]:
    """One app for two hosts, behind a proxy that tells which one."""
    from django.http import HttpResponse
    from django.test import RequestFactory

    from oncekey.adapters.django import idempotent

    @idempotent("memory://", per_host=True)
    def charge(request: Any) -> Any:
        return HttpResponse(request.get_host(), status=201)

    def pay(host: str) -> str:
        headers = {"Idempotency-Key": "k", "Authorization": "ann", "X-Forwarded-Host": host}
        return told(charge(RequestFactory().post("/charge", headers=headers)))

    return [pay("a.example"), pay("b.example"), pay("a.example")]


def stream() -> list[str]:
    """An answer of events that never ends."""
    from django.http import StreamingHttpResponse
    from django.test import RequestFactory

    from oncekey.adapters.django import idempotent

    @idempotent("memory://")
    def events(request: Any) -> Any:
        parts = (b"data: %d\n\n" % number for number in itertools.islice(itertools.count(), 99_999))
        return StreamingHttpResponse(never_all(parts), content_type="text/event-stream")

    headers = {"Idempotency-Key": "k", "Authorization": "ann", "Host": "proxy"}
    first = events(RequestFactory().post("/events", headers=headers))
    part = next(iter(first.streaming_content)).decode()
    return [part, told(events(RequestFactory().post("/events", headers=headers)))]


def never_all(parts: Any) -> Any:
    """Fails where somebody reads ahead."""
    yield next(parts)
    raise AssertionError("a stream of events was read ahead")


def main(folder: str) -> None:
    configure(Path(folder))
    seen = {"forms": forms(), "users": users(), "hosts": hosts(), "stream": stream()}
    print(json.dumps(seen))


if __name__ == "__main__":
    from tests.adapters import parsed_django

    parsed_django.main(*sys.argv[1:])
