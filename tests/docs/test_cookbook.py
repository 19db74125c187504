"""Every provider has a page, and what the page tells to write works."""

from __future__ import annotations

import io
import re
import shlex
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import oncekey.signatures
from oncekey.cli import main
from oncekey.signatures import providers
from oncekey.testing import deliver_twice, sample
from oncekey.testing._keys import keys_of

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMES = list(providers())


def load() -> ModuleType:
    spec = spec_from_file_location("cookbook", ROOT / "docs" / "cookbook.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


COOKBOOK = load()


def blocks(name: str, language: str) -> list[str]:
    page = COOKBOOK.page(providers()[name])
    return [text for kind, text in BLOCK.findall(page) if kind == language]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, for the files that a page's store makes."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_provider_has_its_page(tmp_path: Path) -> None:
    """One file for each name, the older ones removed, and nothing is written twice."""
    (tmp_path / "index.md").write_text("", "utf-8")
    (tmp_path / "gone.md").write_text("", "utf-8")
    COOKBOOK.write(tmp_path)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert {path.stem for path in written} == {"index", *NAMES}
    COOKBOOK.write(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written


@pytest.mark.parametrize("name", NAMES)
def test_the_receiver_of_a_page_takes_an_event_once(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page's own app takes the kit's sample: of two copies it handles one."""
    facts = providers()[name]
    made = keys_of(name)
    if isinstance(made.get("secret"), (str, bytes)):
        text = made["secret"]
        text = text if isinstance(text, str) else text.decode()
        monkeypatch.setenv(COOKBOOK.variable(facts), text)
    monkeypatch.setenv("PAYPAL_WEBHOOK_ID", "1JE4291016473214C")
    receive, *others = blocks(name, "python")
    for other in others:
        exec(compile(other, f"{name}.md", "exec"), {"__name__": "snippet"})
    names = the_app_of(name, receive, monkeypatch)
    url = f"https://shop.example/hooks/{name}"
    report = deliver_twice(names["app"], sample(names["sender"], url=url))
    names["webhooks"].close()
    assert [one.status for one in report.answers] == [names["sender"].ack.status] * 2
    assert report.ok or facts.repeats, report.problems
    assert capsys.readouterr().out.count("handled:") == (2 if facts.repeats else 1)
    assert len(others) == (1 if facts.scheme in COOKBOOK.KEY_PAIRS else 0)


def the_app_of(name: str, code: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page's code makes, with a provider that can sign where only a real one could."""
    real, made = oncekey.signatures.provider, keys_of(name)

    def with_the_kits_keys(called: str, **options: Any) -> Any:
        if providers()[name].scheme not in COOKBOOK.KEY_PAIRS:
            return real(called, **options)
        ours = {"keys", "jwks"}  # the page has none of the provider's: those of the kit
        return real(called, **{**made, **{k: v for k, v in options.items() if k not in ours}})

    names: dict[str, Any] = {"__name__": "snippet"}
    monkeypatch.setattr(oncekey.signatures, "provider", with_the_kits_keys)
    exec(compile(code, f"{name}.md", "exec"), names)
    return names


def test_the_page_of_sns_confirms_a_subscription(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The address is called that the signed message names, once."""
    called: list[str] = []
    names = the_app_of("aws-sns", blocks("aws-sns", "python")[0], monkeypatch)
    names["urlopen"] = lambda url, timeout: called.append(url) or io.BytesIO()
    address = "https://sns.eu-west-1.amazonaws.com/?Action=ConfirmSubscription&Token=2336412f37"
    asked = {"SubscribeURL": address, "Token": "2336412f37", "Message": "You have chosen ..."}
    url = "https://shop.example/hooks/aws-sns"
    kind = "SubscriptionConfirmation"
    delivery = sample(names["sender"], type=kind, body=asked, url=url)
    assert deliver_twice(names["app"], delivery).ok
    names["webhooks"].close()
    assert called == [address]
    assert "handled:" not in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_of_a_page_are_taken(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``oncekey send`` signs what the page says, and ``oncekey init`` knows the provider."""
    facts = providers()[name]
    lines = [line for block in blocks(name, "sh") for line in block.splitlines()]
    if facts.scheme in COOKBOOK.KEY_PAIRS:
        assert lines == []
        return
    monkeypatch.setenv(COOKBOOK.variable(facts), keys_of(name)["secret"])
    sent, served = lines
    command = shlex.split(sent)
    assert command[:3] == ["oncekey", "send", name]
    assert main([*command[1:], "--curl"]) == 0
    assert f"http://127.0.0.1:8000/hooks/{name}" in capsys.readouterr().out
    begun = shlex.split(served.partition("&&")[0])
    assert main(begun[1:]) == 0
    assert f'"{name}"' in (folder / "oncekey.toml").read_text("utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_what_nobody_confirmed(name: str) -> None:
    """Doubts, dates and sources of the table are on the page, and so is where steps are from."""
    facts = providers()[name]
    page = COOKBOOK.page(facts)
    assert ("Unverified" in page) == ("unverified" in facts.source)
    assert f"Checked {facts.checked}" in page
    assert facts.documentation.startswith("https://") or name == "sports-stack"  # it has none
    assert not facts.documentation or f"<{facts.documentation}>" in page
    assert not facts.setup or facts.documentation
    assert ("confirmed no steps" in page) == (not facts.setup)
