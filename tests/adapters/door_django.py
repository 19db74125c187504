"""Views of Django and of its REST framework behind their permissions, called with a real database.

    python -m tests.adapters.door_django FOLDER

Prints what each kind of view answered, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

CALLS: list[str] = []
urlpatterns: list[Any] = []
NEEDED = "auth.change_user"


def configure(folder: Path) -> None:
    import django
    from django.conf import settings

    settings.configure(
        ALLOWED_HOSTS=["*"],
        DATABASES={
            "default": {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": str(folder / "shop.db"),
                "ATOMIC_REQUESTS": True,
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
            "django.contrib.auth.middleware.AuthenticationMiddleware",
        ],
        PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"],
        LOGGING_CONFIG=None,
        ROOT_URLCONF="tests.adapters.door_django",
        SECRET_KEY="shop",
        USE_TZ=True,
    )
    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)


def views(folder: Path) -> dict[str, Any]:
    from django.contrib.auth.decorators import permission_required
    from django.contrib.auth.mixins import PermissionRequiredMixin
    from django.db import connection, transaction
    from django.http import HttpRequest, JsonResponse
    from django.utils.decorators import method_decorator
    from django.views import View
    from rest_framework.authentication import SessionAuthentication
    from rest_framework.decorators import (
        api_view,
        authentication_classes,
        permission_classes,
    )
    from rest_framework.permissions import BasePermission
    from rest_framework.response import Response
    from rest_framework.views import APIView

    from oncekey import AsyncSQLiteStore, SQLiteStore
    from oncekey.adapters.django import by_user, idempotent

    guard = idempotent(SQLiteStore(folder / "keys.db"), scope=by_user)
    guard_async = idempotent(AsyncSQLiteStore(folder / "async.db"), scope=by_user)
    may_charge = permission_required(NEEDED, raise_exception=True)

    class MayCharge(BasePermission):
        def has_permission(self, request: Any, view: Any) -> bool:
            return bool(request.user.has_perm(NEEDED))

    def charge(kind: str) -> dict[str, str]:
        CALLS.append(kind)
        return {"charged": kind}

    @may_charge
    @guard
    def function(request: HttpRequest) -> Any:
        assert connection.in_atomic_block
        return JsonResponse(charge("function"), status=201)

    @method_decorator(guard, name="dispatch")
    class Classy(PermissionRequiredMixin, View):
        permission_required = NEEDED
        raise_exception = True

        def post(self, request: HttpRequest) -> Any:
            assert connection.in_atomic_block
            return JsonResponse(charge("class"), status=201)

    @method_decorator(guard, name="dispatch")
    class Rest(APIView):
        authentication_classes = [SessionAuthentication]
        permission_classes = [MayCharge]

        def post(self, request: Any) -> Any:
            assert connection.in_atomic_block
            return Response(charge("rest"), status=201)

    @transaction.non_atomic_requests
    @api_view(["POST"])
    @authentication_classes([SessionAuthentication])
    @permission_classes([MayCharge])
    @guard
    def rest_function(request: Any) -> Any:
        assert connection.in_atomic_block
        return Response(charge("rest-function"), status=201)

    @may_charge
    @guard_async
    async def coroutine(request: HttpRequest) -> Any:
        return JsonResponse(charge("async"), status=201)

    @method_decorator(guard_async, name="dispatch")
    class AsyncClassy(View):
        async def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            from django.core.exceptions import PermissionDenied

            user = await request.auser()
            if not await user.ahas_perm(NEEDED):
                raise PermissionDenied
            return await super().dispatch(request, *args, **kwargs)

        async def post(self, request: HttpRequest) -> Any:
            return JsonResponse(charge("async-class"), status=201)

    transaction.non_atomic_requests(coroutine)
    return {
        "function": function,
        "class": Classy.as_view(),
        "rest": Rest.as_view(),
        "rest-function": rest_function,
        "async": coroutine,
        "async-class": AsyncClassy.as_view(),
    }


def told(reply: Any) -> str:
    replayed = " replayed" if reply.headers.get("Idempotent-Replayed") == "true" else ""
    return f"{reply.status_code}{replayed}"


def scenario(kind: str) -> list[str]:
    from django.contrib.auth.models import Permission, User
    from django.test import Client

    allowed = Permission.objects.get(codename="change_user")
    ann, bob = (User.objects.create_user(f"{name}-{kind}") for name in ("ann", "bob"))
    for user in (ann, bob):
        user.user_permissions.add(allowed)

    def pay(user: Any) -> str:
        client = Client()
        if user is not None:
            client.force_login(user)
        return told(client.post(f"/{kind}", headers={"Idempotency-Key": "k"}))

    seen = [pay(ann), pay(ann), pay(None), pay(bob)]
    ann.user_permissions.clear()
    seen.append(pay(ann))
    ann.user_permissions.add(allowed)
    return [*seen, pay(ann)]


def opened_for_a_class(folder: Path) -> int:
    """How many stores are opened for five requests to a class that was given a URL."""
    from django.http import HttpResponse
    from django.test import RequestFactory
    from django.utils.decorators import method_decorator
    from django.views import View

    from oncekey.adapters.django import idempotent
    from oncekey.http import entry

    connect, opened = entry.connect, []

    def counted(url: str) -> Any:
        opened.append(url)
        return connect(url)

    entry.connect = counted

    @method_decorator(idempotent(f"sqlite:///{folder}/url.db"), name="dispatch")
    class Charges(View):
        def post(self, request: Any) -> Any:
            return HttpResponse(status=201)

    try:
        for number in range(5):
            headers = {"Idempotency-Key": f"k-{number}", "Authorization": "me"}
            request = RequestFactory().post("/", headers=headers)
            assert Charges.as_view()(request).status_code == 201
    finally:
        entry.connect = connect
    return len(opened)


def main(folder: str) -> None:
    configure(Path(folder))
    from django.contrib.auth.decorators import login_required
    from django.urls import path
    from django.views import View

    from oncekey import PolicyError
    from oncekey.adapters.django import idempotent

    made = views(Path(folder))
    urlpatterns.extend(path(name, view) for name, view in made.items())
    seen: dict[str, Any] = {kind: scenario(kind) for kind in made}
    seen["calls"] = CALLS
    refused = []
    checked = login_required(lambda request: None)
    for view in (View.as_view(), login_required(View.as_view()), made["rest-function"], checked):
        try:
            idempotent("memory://")(view)
        except PolicyError as error:
            refused.append(str(error))
    seen["refused"] = refused
    seen["opened"] = opened_for_a_class(Path(folder))
    print(json.dumps(seen))


if __name__ == "__main__":
    from tests.adapters import door_django

    door_django.main(*sys.argv[1:])
