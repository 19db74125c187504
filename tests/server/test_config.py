"""The config: every fault at once, each with its place and what to write; no secret in sight."""

from __future__ import annotations

from pathlib import Path

import pytest

from oncekey.server.config import read_config, settings_from
from oncekey.server.problems import ConfigError, lines_of
from oncekey.server.settings import KEYS

GOOD = """store = "sqlite:///inbox.db"
[sources.shop]
provider = "stripe"
secret_env = "SHOP_SECRET"
targets = ["app"]
[targets.app]
url = "http://127.0.0.1:9000/events"
allow_private = true
"""
ENVIRON = {"SHOP_SECRET": "whsec_very_secret", "ONCEKEY_TOKEN": "an-admin-token-of-many-letters"}


def faults(text: str, environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        settings_from(text, "gateway.toml", ENVIRON if environ is None else environ)
    return str(caught.value).split("\n  ")[1:]


def test_the_least_config_is_enough() -> None:
    """The eight lines of the documentation make a gateway, with defaults for all else."""
    settings = settings_from(GOOD, "gateway.toml", ENVIRON)
    assert settings.sources["shop"].provider.name == "stripe"
    assert settings.sources["shop"].targets == ("app",)
    assert settings.targets["app"].allow_private
    assert settings.port == 8080
    assert settings.host == "127.0.0.1"
    assert [one.role for one in settings.tokens] == ["admin"]
    assert settings.remember == settings.sources["shop"].provider.retention_seconds


def test_all_faults_are_said_at_once_with_line_key_and_fix() -> None:
    """Each fault has file, line, key and what to write; a typo has the nearest name."""
    text = GOOD.replace("stripe", "strpe").replace("allow_private", "alow_private")
    text = text.replace('["app"]', '["ap"]') + "timeout = -1\n"
    private = "is a private address. Write allow_private = true for an app of yours"
    assert faults(text) == [
        "gateway.toml:3: sources.shop.provider: no provider 'strpe'. Did you mean 'stripe'?",
        "gateway.toml:5: sources.shop.targets: no target 'ap'. Did you mean 'app'?",
        f"gateway.toml:7: targets.app.url: {private}",
        "gateway.toml:8: targets.app.alow_private: is no setting. Did you mean 'allow_private'?",
        "gateway.toml:9: targets.app.timeout: is -1. Give seconds, more than 0, up to ten years",
    ]


@pytest.mark.parametrize(
    "change, told",
    [
        (("store = ", "stor = "), "stor: is no setting. Did you mean 'store'?"),
        (("sqlite:///inbox.db", "redis://x"), "store: there is no inbox of kind 'redis'"),
        (('url = "http://127.0.0.1:9000/events"', ""), "targets.app.url: is missing"),
        (("http://127", "http://me:secret@127"), "has a user or password in it"),
        (("http://127.0.0.1:9000/events", "ftp://x"), "targets.app.url: is no URL"),
        (("allow_private = true", 'allow_private = "yes"'), "is text. Give true or false"),
        (("allow_private = true", "concurrency = 0"), "concurrency must be 1 to 10000"),
        (("allow_private = true", 'where = ["nonsense"]'), "can't be read"),
        (("allow_private = true", "pull = true"), "targets.app.pull: is set beside a url"),
        (("allow_private = true", ""), "targets.app.url: is a private address. Write allow_priv"),
        (("127.0.0.1:9000/events\"\nallow_private = true", "[::1]:9\""), "a private address"),
        (("127.0.0.1:9000/events\"\nallow_private = true", "localhost:9\""), "a private address"),
        (("[targets.app]", "[targets.App]"), "targets.App: is no name"),
        (('provider = "stripe"', ""), "sources.shop.provider: is missing"),
        (("SHOP_SECRET", "OTHER_SECRET"), "the variable OTHER_SECRET is not set"),
        (("store =", "port = 70000\nstore ="), "port: 70000 is no port"),
    ],
)  # fmt: skip
def test_each_fault_names_its_key(change: tuple[str, str], told: str) -> None:
    """Whatever is wrong is said with its key and a fix."""
    found = faults(GOOD.replace(*change))
    assert any(told in line for line in found), found


def test_a_wrong_provider_does_not_hide_a_missing_secret() -> None:
    """All at once: nobody has to come back for the next fault of the same source."""
    text = GOOD.replace("stripe", "strpe").replace("SHOP_SECRET", "OTHER_SECRET")
    assert [one.partition(": ")[2].partition(":")[0] for one in faults(text)] == [
        "sources.shop.provider",
        "sources.shop.secret_env",
    ]


def test_what_a_name_leads_to_is_no_fault_of_the_config() -> None:
    """It is seen where it is dialled, and may be another address then."""
    for host in ("shop.example", "8.8.8.8", "[2606:4700::1]"):
        text = GOOD.replace("http://127.0.0.1:9000", f"https://{host}")
        settings_from(text.replace("allow_private = true", ""), "gateway.toml", ENVIRON)


def test_a_file_that_is_no_toml_says_where() -> None:
    """A syntax error has its line."""
    assert faults(GOOD + "x = = 1\n")[0].startswith("gateway.toml:9: is no TOML: ")


def test_no_secret_is_shown(tmp_path: Path) -> None:
    """Neither the settings nor a fault show a secret, also one typed where its name belongs."""
    settings = settings_from(GOOD, "gateway.toml", ENVIRON)
    assert "whsec_very_secret" not in repr(settings)
    assert "an-admin-token" not in repr(settings)
    assert settings.sources["shop"].secret_from == "$SHOP_SECRET"
    typed = faults(GOOD.replace('"SHOP_SECRET"', '"whsec_typed_here"'))
    assert "whsec_typed_here" not in str(typed)


def test_a_secret_comes_from_a_file(tmp_path: Path) -> None:
    """``secret_file`` is read beside the config, without its line end."""
    (tmp_path / "secret").write_text("whsec_of_a_file\n")
    file = tmp_path / "gateway.toml"
    file.write_text(GOOD.replace('secret_env = "SHOP_SECRET"', 'secret_file = "secret"'))
    stripe = read_config(str(file), {}).sources["shop"].provider
    request = stripe.sign("POST", "http://x/", {}, b'{"id": "evt_1"}')
    assert stripe.verify(*request).ok
    (tmp_path / "secret").unlink()
    with pytest.raises(ConfigError, match="secret_file: can't be read"):
        read_config(str(file), {})


def test_the_environment_stands_above_the_file() -> None:
    """``ONCEKEY__A__B`` is ``b`` in ``[a]``; without a file it is the whole config."""
    above = {**ENVIRON, "ONCEKEY__PORT": "9001", "ONCEKEY__TARGETS__APP__TIMEOUT": "2.5"}
    settings = settings_from(GOOD, "gateway.toml", above)
    assert settings.port == 9001
    assert settings.targets["app"].policy.timeout == 2.5
    alone = {
        **ENVIRON,
        "ONCEKEY__STORE": "sqlite:///inbox.db",
        "ONCEKEY__SOURCES__SHOP__PROVIDER": "stripe",
        "ONCEKEY__SOURCES__SHOP__SECRET_ENV": "SHOP_SECRET",
        "ONCEKEY__SOURCES__SHOP__TARGETS": '["app"]',
        "ONCEKEY__TARGETS__APP__URL": "https://example.com/events",
    }
    assert read_config(None, alone).targets["app"].url == "https://example.com/events"


def test_a_provider_of_your_own() -> None:
    """``provider = "hmac"`` takes the options of ``hmac_provider``."""
    own = '\n[sources.shop.options]\nheader = "X-Sign"\nevent_id = "id"\n'
    settings = settings_from(GOOD.replace("stripe", "hmac") + own, "gateway.toml", ENVIRON)
    provider = settings.sources["shop"].provider
    request = provider.sign("POST", "http://x/", {}, b'{"id": "e-1"}')
    assert "X-Sign" in request.headers
    assert provider.verify(*request).event_id == "e-1"


def test_credentials_are_never_kept() -> None:
    """``keep_headers`` refuses headers that carry credentials."""
    found = faults(GOOD.replace("targets =", 'keep_headers = ["Authorization"]\ntargets ='))
    assert "can't keep 'authorization'" in found[0]


def test_a_short_token_is_refused() -> None:
    """A token that can be guessed is a fault, and is not shown."""
    found = faults(GOOD, {**ENVIRON, "ONCEKEY_TOKEN": "hunter2"})
    assert "less than 16 characters" in found[0]
    assert "hunter2" not in found[0]


def test_lines_are_found_for_every_way_to_write_a_key() -> None:
    """Tables, dotted keys and quoted names have their lines."""
    text = 'a = 1\n[b.c]  # told\nd = 2\n"e f" = 3\ng.h = 4\n'
    assert lines_of(text) == {"a": 1, "b.c": 2, "b.c.d": 3, "b.c.e f": 4, "b.c.g.h": 5}


def test_every_key_has_a_line_of_help() -> None:
    """The table of keys says what each is for: the reference is held to it."""
    for table in KEYS.values():
        for rule in table.values():
            assert len(rule.help) > 10


@pytest.mark.parametrize(
    "change, told",
    [
        (("store =", "remember = 1\nstore ="), "remember: is 1. Give at least 60 seconds"),
        (
            ("store =", "remember = 1e300\nstore ="),
            "remember: is 1e+300. Give seconds",
        ),
        (("store =", "retention = 1\nstore ="), "retention: is 1. Give at least 60 seconds"),
        (("allow_private", "timeout = 1e300\nallow_private"), "targets.app.timeout: is 1e+300"),
        (("9000/events", "9000/ev ents"), "targets.app.url: is no URL"),
        (("9000/events", "9000/\\r\\nX-More: 1"), "targets.app.url: is no URL"),
        (("store =", f"x = {'[' * 5000}{']' * 5000}\nstore ="), "is nested too deeply"),
    ],
)
def test_what_is_checked_is_what_starts(change: tuple[str, str], told: str) -> None:
    """What a start or a delivery would stumble over is a fault of the config, said by its place."""
    assert told in faults(GOOD.replace(*change))[0]


@pytest.mark.parametrize(
    "store",
    [
        "geheim",
        "user:geheim@host/db",
        "Geheim://host",
        "postgresq://user:geheim@host/db",
        "geheim" * 10 + "://host",
    ],
)
def test_a_wrong_store_is_not_repeated(store: str) -> None:
    """Whatever stands where the store's URL belongs: a password in it is not printed."""
    with pytest.raises(ConfigError) as caught:
        settings_from(f'store = "{store}"\n', "x", {})
    assert "geheim" not in str(caught.value).lower()
    assert "sqlite:///FILE" in str(caught.value)


def test_a_wrong_role_is_not_repeated() -> None:
    """A password that stands where a role belongs is not printed."""
    text = 'store = "sqlite:///x.db"\n[users.a]\npassword_hash = "$argon2x"\nrole = "geheim"\n'
    with pytest.raises(ConfigError) as caught:
        settings_from(text, "x", {})
    told = "x:4: users.a.role: is none of the roles. Known are admin, operate, read"
    assert told in str(caught.value)
    assert "geheim" not in str(caught.value)
