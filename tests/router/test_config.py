"""Configuration from files, settings and options."""

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from smetric_router.config import RouterConfig, load_config
from smetric_router.errors import ConfigError
from smetric_router.policies.registry import build_policies

EXAMPLE = Path(__file__).parents[2] / "configs" / "router.toml"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SMETRIC_ROUTER_CONFIG", "SMETRIC_ROUTER_ENGINE_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_the_example_shows_every_key_with_its_default() -> None:
    config = load_config(EXAMPLE)
    build_policies(config.policies)
    text = EXAMPLE.read_text()
    for field in dataclasses.fields(RouterConfig):
        assert f"\n{field.name} = " in text or f"\n# {field.name} = " in text or f"[{field.name}." in text, field.name
    everything = tomllib.loads(re.sub(r"(?m)^# (?=\w+ = )", "", text))  # examples in comments stand farther in
    for name, value in everything.items():
        if name not in ("engines", "policies"):
            shown_value = tuple(value) if isinstance(value, list) else value
            assert shown_value == getattr(RouterConfig(), name), name


def test_the_example_shows_every_parameter_of_every_policy() -> None:
    shown = load_config(EXAMPLE).policies
    for name, policy in build_policies({}).items():
        parameters = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}  # type: ignore[arg-type]
        assert shown.get(name, {}) == parameters, name


def test_the_later_source_wins(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text('engines = ["http://a:1/"]\nport = 1\nretries_max = 0\n[policies.smetric]\noverload = 3.0\n')
    config = load_config(
        file, ["port=2", "policies.smetric.hit_ratio=0.25", "policy=least-loaded", 'host="::1"'], {"host": "h"}
    )
    assert (config.port, config.host, config.policy, config.retries_max) == (2, "h", "least-loaded", 0)
    assert config.engines == ("http://a:1",)
    assert config.policies == {"smetric": {"overload": 3.0, "hit_ratio": 0.25}}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.port = 3  # type: ignore[misc]


def test_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text("port = 5")
    monkeypatch.setenv("SMETRIC_ROUTER_CONFIG", str(tmp_path / "r.toml"))
    monkeypatch.setenv("SMETRIC_ROUTER_ENGINE_API_KEY", "secret")
    config = load_config(None)
    assert (config.port, config.engine_api_key) == (5, "secret")
    assert "secret" not in repr(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("polcy = 1", "r.toml: unknown key 'polcy'; did you mean 'policy'?"),
        ("zzzzzz = 1", "r.toml: unknown key 'zzzzzz'; known: engines"),
        ("port = 'x'", "r.toml: Expected `int`, got `str` - at `$.port`"),
        ("port = 70000", "port = 70000 is not between 0 and 65535"),
        ("log_format = 'xml'", "log_format = 'xml' is not one of logfmt, json"),
        ("port = = 1", "r.toml is not valid TOML"),
        ("report_interval_s = 20", "report_stale_s = 10 is less than report_interval_s = 20"),
        ("engines = 'http://a:1'", "r.toml: Expected `array`"),
        ("engines = ['127.0.0.1:1']", "'127.0.0.1:1' is not a URL like http"),
        ("engines = ['http://a:99999']", "is not a URL"),
        ("engines = ['http://a:1/v1/']", "ends with /v1"),
        ("engines = ['http://a:1?x=1']", "query"),
        ("engines = ['http://a:0']", "'http://a:0' has the port 0"),
        ("engines = ['http://[::1']", "is not a URL: Invalid IPv6 URL"),
        ("engines = ['http://ü..x:1']", "has no host name"),
        ("engines = ['http://" + "ü" * 70 + ":1']", "has no host name"),
        ("engines = ['http://a:1', 'http://a:1/']", "http://a:1 is listed twice"),
        ("engines = ['http://a:80', 'HTTP://A']", "HTTP://A is listed twice"),
        ("engines = ['http://me:secret@a:1']", "the URL for a has credentials"),
        ("engines = [' http://a:1']", "space or a control character"),
        ('engines = ["http://a:1\\n"]', "space or a control character"),
        ('engines = ["http://a:1/x\\u0000y"]', "space or a control character"),
        ("tls_cert = 'a.pem'", "tls_cert and tls_key: give both, or neither"),
        ("api_keys = ['a b']", "api_keys: only printable ASCII characters without spaces"),
        ("api_keys = ['']", "api_keys: only printable ASCII"),
        ("admin_key = 'a b'", "admin_key: only printable ASCII"),
        ("queue_max = -1", "queue_max = -1 is not between 0 and 1000000"),
        ('engine_api_key = "secret\\nsecret"', "engine_api_key: only printable ASCII"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "r.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as wrong:
        load_config(file)
    assert message in wrong.value.message
    assert "\n" not in wrong.value.message and "secret" not in wrong.value.message


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "-0.1"])
@pytest.mark.parametrize("key", ["overload", "hit_ratio", "overload_min", "tie_spread"])
def test_policy_parameters_are_finite_and_not_negative(key: str, value: str) -> None:
    config = load_config(None, [f"policies.smetric.{key}={value}"])
    with pytest.raises(ConfigError, match=rf"policies\.smetric\.{key} = "):
        build_policies(config.policies)
    build_policies(load_config(None, [f"policies.smetric.{key}=0"]).policies)


def test_the_end_of_the_line_is_no_part_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMETRIC_ROUTER_ENGINE_API_KEY", "secret\n")
    assert load_config(None).engine_api_key == "secret"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("port", "--set port: expected key=value"),
        ("prot=1", "--set prot=1: unknown key 'prot'; did you mean 'port'?"),
        ("port.x=1", "--set port.x=1: only policies.NAME.KEY has parts"),
        ("policies.smetric=1", "only policies.NAME.KEY"),
        ('tokenizers={org/model = "/models/m"}', "a name with slashes or dots needs quotes"),
        ("retries_max=3", "retries_max = 3 is not between 0 and 2"),
    ],
)
def test_mistakes_in_settings_are_named(setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        load_config(None, [setting])
    assert message in wrong.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml: No such file"):
        load_config(tmp_path / "none.toml")


def test_one_request_takes_a_part_of_the_index_only() -> None:
    assert RouterConfig(engines=("http://a:1",)).chunks_per_request_max == 32_768
    assert RouterConfig(engines=("http://a:1", "http://b:1"), index_chunks_max=800).chunks_per_request_max == 100
    assert RouterConfig(index_chunks_max=1).chunks_per_request_max == 1


def test_tokenizers_by_model_and_the_peers_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMETRIC_ROUTER_PEER_TOKEN", "a token of a file\n")
    config = load_config(
        None,
        ["index=exact", "tokenizers.org/model-1.5=/models/a", 'tokenizers.b="/models/b"', 'peers=["h:1"]'],
        {"engines": ["http://a:1"]},
    )
    assert config.tokenizers == {"org/model-1.5": "/models/a", "b": "/models/b"}
    assert (config.peers, config.peer_token) == (("h:1",), "a token of a file")
