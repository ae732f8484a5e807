"""Settings: where they come from, and what stops a start."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from sandbox import ConfigError, Limits
from sandbox.jail.policy import MAX_SLOTS
from sandbox.settings import PREFIX, CeilingSettings, Settings, load_settings


def config(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "sandbox.toml"
    path.write_text(text)
    return {"SANDBOX_CONFIG": str(path)}


def test_an_empty_environment_gives_the_defaults() -> None:
    """Nothing has to be set, and what is not ours is left alone."""
    assert load_settings({"PATH": "/bin", "SANDBOXED": "1"}) == Settings()


def test_the_environment_wins_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    """Each value comes from the strongest source that has it."""
    environ = config(tmp_path, "[gateway]\nport = 1\nmax_batch = 7\n[worker]\nslots = 3\n")
    settings = load_settings(environ | {"SANDBOX_GATEWAY__PORT": "2"})
    assert (settings.gateway.port, settings.gateway.max_batch, settings.worker.slots) == (2, 7, 3)
    assert settings.gateway.host == Settings().gateway.host


def test_a_caller_s_key_is_no_setting() -> None:
    """Whoever has SANDBOX_API_KEY for the client can still start a service; a misspelt one is named."""
    assert load_settings({"SANDBOX_API_KEY": "rsk_secret"}) == Settings()
    with pytest.raises(ConfigError, match="SANDBOX_APIKEY is no setting") as caught:
        load_settings({"SANDBOX_APIKEY": "rsk_secret"})
    assert "rsk_secret" not in caught.value.message


def test_redis_url_is_understood_and_ours_wins() -> None:
    """REDIS_URL stands for SANDBOX_REDIS__URL, unless that is set too."""
    assert load_settings({"REDIS_URL": "redis://a"}).redis.url == "redis://a"
    assert (
        load_settings({"REDIS_URL": "redis://a", "SANDBOX_REDIS__URL": "redis://b"}).redis.url == "redis://b"
    )


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("SANDBOX_GATEWAY__PROT", "gateway.port (SANDBOX_GATEWAY__PORT)"),
        ("SANDBOX_GATWAY__PORT", "gateway.port (SANDBOX_GATEWAY__PORT)"),
        ("SANDBOX_PORT", "gateway.port (SANDBOX_GATEWAY__PORT)"),
        ("SANDBOX_REDIS_URL", "redis.url (SANDBOX_REDIS__URL)"),
        ("SANDBOX_WORKER__SLOT", "worker.slots (SANDBOX_WORKER__SLOTS)"),
        ("SANDBOX_WORKER__", "worker."),
    ],
)
def test_an_unknown_variable_stops_the_start(variable: str, nearest: str) -> None:
    """The error names it and the nearest that we know, with its variable."""
    with pytest.raises(ConfigError) as caught:
        load_settings({variable: "1"})
    assert f"the variable {variable} is no setting of ours. The nearest is {nearest}" in caught.value.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[gateway]\nprot = 1\n", "gateway.prot in .*sandbox.toml is no setting of ours. The nearest is gateway.port"),
        ("port = 1\n", "port stands outside of a section"),
        ("[gatway]\n", r"\[gatway\] in .*sandbox.toml is no setting of ours. The nearest is gateway"),
        ("[gateway\n", "cannot read the settings file .*sandbox.toml"),
        ("[gateway]\nport = 70000\n", r"setting gateway\.port \(SANDBOX_GATEWAY__PORT\): Input should be less than or equal to 65535"),
    ],
)  # fmt: skip
def test_a_bad_file_stops_the_start(tmp_path: Path, text: str, words: str) -> None:
    """Unknown names, values without a section, broken TOML and values out of bounds are named."""
    with pytest.raises(ConfigError, match=words):
        load_settings(config(tmp_path, text))


def test_a_file_that_is_not_there_stops_the_start() -> None:
    """SANDBOX_CONFIG is a promise."""
    with pytest.raises(ConfigError, match=r"cannot read the settings file /nowhere\.toml"):
        load_settings({"SANDBOX_CONFIG": "/nowhere.toml"})


@pytest.mark.parametrize("value", ["", "many", "-1", "1.5"])
def test_a_value_that_makes_no_sense_stops_the_start(value: str) -> None:
    """The error names the setting and its variable."""
    with pytest.raises(ConfigError, match=r"setting worker\.slots \(SANDBOX_WORKER__SLOTS\): "):
        load_settings({"SANDBOX_WORKER__SLOTS": value})


@pytest.mark.parametrize(
    ("also", "addresses"),
    [
        ("", []),
        ("127.0.0.1:8088", [("127.0.0.1", 8088)]),
        ("localhost:0", [("localhost", 0)]),
        ("[::1]:8088, 10.0.0.1:80", [("::1", 8088), ("10.0.0.1", 80)]),
    ],
)
def test_a_further_address_is_a_host_and_a_port(also: str, addresses: list[tuple[str, int]]) -> None:
    """Of IPv6 the host stands in brackets; several have commas between."""
    assert load_settings({"SANDBOX_GATEWAY__ALSO": also}).gateway.also == tuple(addresses)


@pytest.mark.parametrize("also", ["8088", ":8088", "::1:8088", "localhost", "localhost:", "a b:1", "a:65536"])
def test_what_is_no_address_stops_the_start(also: str) -> None:
    """The error names the setting and says what an address is."""
    with pytest.raises(ConfigError, match=r"setting gateway\.also \(SANDBOX_GATEWAY__ALSO\): .*HOST:PORT"):
        load_settings({"SANDBOX_GATEWAY__ALSO": also})


def test_an_empty_place_for_the_runtime_stops_the_start() -> None:
    """It would mean the folder that the program was started in."""
    with pytest.raises(ConfigError, match=r"setting jail\.runtime \(SANDBOX_JAIL__RUNTIME\): .*empty"):
        load_settings({"SANDBOX_JAIL__RUNTIME": ""})


def test_the_most_slots_are_those_that_a_worker_has_users_for() -> None:
    """One more is refused by the settings, not only by the worker."""
    assert load_settings({"SANDBOX_WORKER__SLOTS": str(MAX_SLOTS)}).worker.slots == MAX_SLOTS
    with pytest.raises(ConfigError, match=r"worker\.slots .*less than or equal to 4095"):
        load_settings({"SANDBOX_WORKER__SLOTS": str(MAX_SLOTS + 1)})


def test_every_setting_can_come_from_the_environment() -> None:
    """Each has a variable that is accepted with its default's own words."""
    defaults = Settings()
    environ = {
        f"{PREFIX}{section}__{name}".upper(): ",".join(value) if isinstance(value, tuple) else str(value)
        for section, values in defaults
        for name, value in values
    }
    assert len(environ) > 20
    assert load_settings(environ) == defaults


def test_settings_are_frozen() -> None:
    """Nobody changes what all have read."""
    with pytest.raises(ValidationError):
        Settings().gateway.port = 1  # type: ignore[misc]


def test_defaults_of_a_call_never_exceed_the_ceilings() -> None:
    """A call that names no limits is never refused for its limits."""
    assert CeilingSettings().defaults() == Limits()
    low = CeilingSettings(wall_s=1.0, memory_bytes=32 * 1024 * 1024, processes=1)
    assert low.defaults() == Limits(wall_s=1.0, memory_bytes=32 * 1024 * 1024, processes=1)


def test_a_network_that_the_level_cannot_give() -> None:
    """What no worker at this level could give stops the start, not each call."""
    process = {"SANDBOX_JAIL__LEVEL": "process"}
    assert load_settings(process).jail.level == "process"
    with pytest.raises(ConfigError, match=r"ceilings\.network is loopback, .* jail\.level process has none"):
        load_settings(process | {"SANDBOX_CEILINGS__NETWORK": "loopback"})
