"""The cookbook: a page for each provider, made from the table that the library itself reads.

``conf.py`` writes the pages into ``docs/providers`` before Sphinx looks for documents. They are not
in the repository: a fact is changed in ``src/oncekey/signatures/providers*.toml`` alone.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from oncekey.signatures import providers
from oncekey.signatures.facts import DAY, Facts
from oncekey.testing._bodies import BODIES
from oncekey.testing._placing import in_batch, put_type

HOST = "https://shop.example"
NO_SECRET = {"jwt", "sns", "paypal"}
KEY_PAIRS = {"key-pair", "rfc9421", *NO_SECRET}  # only the provider can sign
INTRODUCTION = (
    "How to take the webhooks of {facts.title} with [a receiver](../howto/receive-webhooks.md) or "
    "[the gateway](../howto/run-the-gateway.md). Its name here is `{facts.name}`."
)
UNVERIFIED = """:::{{admonition}} Unverified
:class: warning

No public document of {title} that we could read confirms this: {doubt}. Check it against a
delivery of your own before you rely on it.
:::"""
UNSIGNED = """:::{{admonition}} The {what} is not signed
:class: warning

{why}
:::"""
NO_STEPS = (
    "Add a webhook with the URL `{url}`, your own host in place of `shop.example`. We have "
    "confirmed no steps for its dashboard: see the provider's documentation{documentation}."
)
NO_ID = """

Its events have no id. The receiver goes by the message that was signed: a retry with the same bytes
is a duplicate, and two events with the same bytes are one. Where the body has something that names
the event, pass a function of it as `key=`."""
REPEATS = """

Its events have no id, and two that are alike may be two. So that no event is lost, the receiver
handles each delivery, a retry too: write a handler that is safe to run again. Where the body has
something that names the event, pass `event_id=` to `provider`, or a function of the payload as
`key=` to `webhooks.on`; a copy is then a duplicate, as for other providers."""
IN_TESTS = """Only {title} has the key to sign with, so `oncekey send` can't stand in for it. In
tests, `oncekey.testing.sample("{name}")` signs with a key of its own; `delivery.provider` knows it:

```python
from oncekey.receiver import WebhookReceiver
from oncekey.testing import sample

delivery = sample("{name}")
receiver = WebhookReceiver(delivery.provider, "memory://")
receiver.on()(lambda event: None)
assert receiver.receive(*delivery).outcome == "handled"
assert receiver.receive(*delivery.again()).outcome == "{copy}"
```"""
SEND = """With the app above in `app.py` (`flask --app app run --port 8000`), this sends one event
three times. All copies get a 2xx, and the handler runs {runs}:

```sh
oncekey send {name}{kind} http://127.0.0.1:8000{path} --secret-env {secret} --times 3
```

For an app in another language, the gateway. `ONCEKEY_TOKEN` is a token of yours, 16 characters or
more:

```sh
oncekey init {name} && oncekey serve --config oncekey.toml
```"""
FORM = """```text
MessageSid=SM0&From=%2B15005550006&Body=Hello
```

The fields are those of a form."""
SAMPLE = """A body as the provider's documentation shows one, cut to a few fields, without its id:

```json
{body}
```"""
KINDS = {
    "hmac": "HMAC with a shared secret",
    "standard-webhooks": "[Standard Webhooks](https://www.standardwebhooks.com)",
    "token": "a secret token that comes along, compared in constant time",
    "jwt": "a signed JSON Web Token",
    "sns": "a signature with Amazon's certificate",
    "paypal": "a signature with PayPal's certificate",
    "twilio": "HMAC over the URL and the parameters",
    "adyen": "HMAC over fields of each item",
    "mailgun": "HMAC over a timestamp and a token",
    "key-pair": "a signature with the provider's private key",
    "rfc9421": "HTTP Message Signatures (RFC 9421)",
}


def write(folder: Path) -> None:
    """Write a page for each provider into ``folder``, and remove pages of those that are gone."""
    wanted = {f"{name}.md": page(facts) for name, facts in providers().items()}
    for path in folder.glob("*.md"):
        if path.name != "index.md" and path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        path = folder / name
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")


def page(facts: Facts) -> str:
    """The page of one provider, as MyST."""
    parts = [
        f"# {facts.title}",
        INTRODUCTION.format(facts=facts),
        *_warnings(facts),
        "## Set it up",
        *_set_up(facts),
        "## Receive",
        _receive(facts),
        "## Try it",
        _try(facts),
        "## What is known",
        _table(facts),
        "## A sample",
        _sample(facts),
    ]
    if facts.notes:
        parts += ["## Good to know", _escaped(facts.notes)]
    parts += ["## Where this comes from", _sources(facts)]
    return "\n\n".join(parts) + "\n"


# ------------------------------------------------------------------------------------- its parts


def variable(facts: Facts) -> str:
    """The environment variable that the page puts the secret into."""
    return re.sub(r"\W", "_", facts.name).upper() + "_SECRET"


def unverified(facts: Facts) -> str:
    """What of the facts nobody has confirmed, in the words of the table; empty if nothing."""
    parts = [part.strip() for part in facts.source.split(";")]
    return "; ".join(
        part.removeprefix("unverified:").strip() for part in parts if part.startswith("unverified")
    )


def _warnings(facts: Facts) -> list[str]:
    found = []
    if doubt := unverified(facts):
        found.append(UNVERIFIED.format(title=facts.title, doubt=_escaped(doubt)))
    if facts.unsigned:
        why = _sentence(facts.unsigned["why"])
        found.append(UNSIGNED.format(what=facts.unsigned["what"], why=why))
    return found


def _set_up(facts: Facts) -> list[str]:
    steps = [_escaped(step) for step in facts.setup]
    if not steps:
        where = f", {_address(facts.documentation)}" if facts.documentation else ""
        steps = [NO_STEPS.format(url=HOST + _path(facts), documentation=where)]
    if facts.scheme in NO_SECRET or facts.name == "adcp":
        steps.append(
            f"There is no shared secret. What the receiver needs: {_escaped(facts.secret)}."
        )
    else:
        steps.append(f"Put {_escaped(facts.secret)} into the variable `{variable(facts)}`.")
    listed = "\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1))
    if facts.setup:
        listed += f"\n\nThe steps are from {_address(facts.documentation)}."
    return [listed]


def _receive(facts: Facts) -> str:
    lines = ["from flask import Flask", "", "from oncekey.adapters.flask import Webhooks"]
    lines.append("from oncekey.signatures import provider")
    if facts.scheme == "sns":
        lines.append("from oncekey.signatures.sns import confirm_url")
        lines = ["from urllib.request import urlopen", "", *lines]
    if _reads_environment(facts):
        lines = ["import os", "", *lines]
    kind = json.dumps(BODIES[facts.name].type) if facts.event_type else ""
    lines += [
        "",
        "app = Flask(__name__)",
        'webhooks = Webhooks(app, store="sqlite:///webhooks.db")',
    ]
    lines += [*_helper(facts), f"sender = provider({_arguments(facts)})", "", ""]
    words = [json.dumps(_path(facts)), "sender", *([kind] if kind else [])]
    lines += [f"@webhooks.on({', '.join(words)})", "def handle(event):"]
    lines.append('    print("handled:", event.id, flush=True)  # your work')
    lines += _confirmed(facts)
    text = "```python\n" + "\n".join(lines) + "\n```"
    if facts.event_id is None:
        text += REPEATS if facts.repeats else NO_ID
    return text


def _try(facts: Facts) -> str:
    if facts.scheme in KEY_PAIRS:
        copy = "handled" if facts.repeats else "duplicate"
        return IN_TESTS.format(title=facts.title, name=facts.name, copy=copy)
    kind = f" {shlex.quote(BODIES[facts.name].type)}" if facts.event_type else ""
    runs = "three times" if facts.repeats else "once"
    where, secret = _path(facts), variable(facts)
    return SEND.format(name=facts.name, kind=kind, path=where, secret=secret, runs=runs)


def _table(facts: Facts) -> str:
    rows = {
        "verified by": _verified_by(facts),
        "the event's id": _id(facts),
        "its type": place(facts.event_type) if facts.event_type else "none",
        "a delivery has": _batch(facts.batch),
        "its Content-Type may be": " or ".join(f"`{one}`" for one in facts.content_types),
        "clocks may differ by": _span(facts.tolerance) if facts.tolerance else "",
        "a delivery may be old by": _span(facts.max_age) if facts.max_age else "",
        "it retries": _escaped(facts.retries),
        "it can be sent again by hand": _escaped(facts.redelivery),
        "it waits for an answer": _span(facts.timeout_seconds)
        if facts.timeout_seconds
        else "not known",
        "a failed handler is answered": str(facts.retry_status),
        "an event is remembered for": _span(facts.retention),
        "checks of the endpoint": _checks(facts),
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items() if value]
    return "\n".join(["| | |", "|---|---|", *lines])


def _sample(facts: Facts) -> str:
    if facts.scheme == "twilio":
        return FORM
    body = BODIES[facts.name]
    event: Any = json.loads(json.dumps(body.event))
    headers: dict[str, str] = {}
    if facts.event_type:
        put_type(facts, headers, event, body.type)  # type: ignore[arg-type]
    payload = in_batch(facts, event, body.around)  # type: ignore[arg-type]
    return SAMPLE.format(body=json.dumps(payload, indent=2))


def _sources(facts: Facts) -> str:
    text = f"{_sentence(facts.source)} Checked {facts.checked}."
    if facts.documentation:
        text += f" The provider's documentation: {_address(facts.documentation)}."
    return text + f" `oncekey providers {facts.name}` prints the same from the installed package."


# ---------------------------------------------------------------------------------------- words


def _path(facts: Facts) -> str:
    return f"/hooks/{facts.name}"


def _reads_environment(facts: Facts) -> bool:
    return facts.scheme not in NO_SECRET - {"paypal"} and facts.name != "adcp"


def _helper(facts: Facts) -> list[str]:
    if facts.name == "plaid":
        return [
            "",
            "",
            "def keys():",
            '    return {"keys": []}  # what Plaid gave you for each key id',
            "",
            "",
        ]
    if facts.name == "adcp":
        return [
            "",
            "",
            "def keys():",
            '    return {"keys": []}  # the JSON Web Key Set of the sender',
            "",
            "",
        ]
    return []


def _confirmed(facts: Facts) -> list[str]:
    """The handler of what asks whether a subscription is wanted."""
    if facts.scheme != "sns":
        return []
    return [
        "",
        "",
        f'@webhooks.on("{_path(facts)}", sender, "SubscriptionConfirmation")',
        "def confirm(event):",
        "    # Signed, and of one of your topics: nothing comes until this address was called.",
        "    urlopen(confirm_url(event.payload), timeout=10).close()",
    ]


def _arguments(facts: Facts) -> str:
    given = [json.dumps(facts.name)]
    if facts.name == "adcp":
        given += ["jwks=keys", 'publisher="buyer.example"']
    elif facts.name == "plaid":
        given.append("keys=keys")
    elif facts.scheme == "jwt":
        given += [
            f'audience="{HOST}{_path(facts)}"',
            'email="push@my-project.iam.gserviceaccount.com"',
        ]
    elif facts.scheme == "sns":
        given.append('topics=["arn:aws:sns:eu-west-1:123456789012:orders"]')
    elif facts.scheme == "paypal":
        given.append('webhook_id=os.environ["PAYPAL_WEBHOOK_ID"]')
    else:
        given.append(f'secret=os.environ["{variable(facts)}"]')
    if facts.unsigned:
        given.append(f'accept_unsigned="{facts.unsigned["what"]}"')
    if facts.greeting.get("token"):
        given.append('verify_token="a word of yours"')
    if facts.scheme in ("twilio", "rfc9421") or "{url}" in facts.settings.get("signed", ""):
        given.append('allowed_hosts=["shop.example", "127.0.0.1:8000"]')
    if len(", ".join(given)) > 80:
        return "\n    " + ",\n    ".join(given) + ",\n"
    return ", ".join(given)


def _verified_by(facts: Facts) -> str:
    text = KINDS[facts.scheme]
    names = facts.settings.get("header", [])
    names = [names] if isinstance(names, str) else names
    if facts.settings.get("families"):
        names = [f"{family}-signature" for family in facts.settings["families"]]
    if names:
        shown = [f"`{name}`" for name in (names if len(names) < 4 else [names[0], names[-1]])]
        text += ", in the header " + (" to " if len(names) >= 4 else " or ").join(shown)
    if "algorithm" in facts.settings:
        text += f" ({facts.settings['algorithm'].upper().replace('SHA', 'SHA-')})"
    return text


def place(path: str) -> str:
    """Where something is, as ``oncekey.signatures.event_fields`` writes it, in words."""
    hashed = path.startswith("sha256:")
    always, sometimes = [], []
    for part in path.removeprefix("sha256:").split("+"):
        names = part.removesuffix("?").removeprefix("header:").split("|")
        text = " or ".join(f"`{name}`" for name in names)
        text = f"the header {text}" if part.startswith("header:") else f"{text} in the body"
        (sometimes if part.endswith("?") else always).append(text)
    said = " and ".join(always)
    if sometimes:
        said += "; where they are there, also " + ", ".join(sometimes)
    return f"derived: a hash of {said}" if hashed else said


def _id(facts: Facts) -> str:
    if facts.event_id:
        return place(facts.event_id)
    return "none: each delivery is handled" if facts.repeats else "none"


def _batch(path: str | None) -> str:
    if path is None:
        return "one event"
    return "a list of events: the whole body" if path == "$" else f"a list of events, `{path}`"


def _checks(facts: Facts) -> str:
    kinds = ["in a signed POST"] if facts.handshake else []
    kinds += ["in a GET"] if facts.greeting else []
    return f"answered by the receiver, {' and '.join(kinds)}" if kinds else ""


def _span(seconds: float) -> str:
    for size, unit in ((DAY, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= 2 * size or seconds == size:
            number = round(seconds / size, 1)
            shown = f"{number:g}"
            return f"{shown} {unit}{'' if shown == '1' else 's'}"
    return f"{seconds:g} seconds"


def _address(text: str) -> str:
    return f"<{text}>"


def _sentence(text: str) -> str:
    text = _escaped(text[:1].upper() + text[1:])
    return text if text.endswith(".") else text + "."


def _escaped(text: str) -> str:
    """Text of the table in Markdown: what looks like code is code, and nothing else is special."""
    text = re.sub(
        r"(?<![`\w/:+'])(\w+(?:_\w+)+=?(?:'[^']*')?|\w+=(?:'[^']*')?)(?![`\w/:+'])", r"`\1`", text
    )
    return re.sub(r"(?<!`)([<>|*$])", r"\\\1", text)
