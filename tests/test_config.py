"""Every wrong value is one line that names it, and nothing wrong gets through."""

from pathlib import Path
from typing import Any

import pytest

from tensorcast_connector.config import (
    default_cache_dir,
    default_runtime_dir,
    parse_address,
    parse_endpoints,
    parse_size,
)
from tensorcast_connector.engines.options import ConnectorConfig
from tensorcast_connector.errors import ConfigError
from tensorcast_connector.settings import StoreConfig, WorkerConfig, config_from_file, parse_roles
from tensorcast_connector.types import Address


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("512MiB", 512 << 20), (" 4 GiB ", 4 << 30), ("1.5GiB", 3 << 29), ("2gb", 2 * 10**9), ("1TiB", 1 << 40),
     ("123456789012345678", 123456789012345678), ("0.1KiB", 102), ("0", 0)],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "arena") == size


@pytest.mark.parametrize("text", ["", "GiB", "1 GB x", "-1", "1e9", "1,5GiB", "0x10", "1PiB", "nan", "9" * 400, "١GiB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^arena=.* is not a size; write for example 512MiB or 4GiB$"):
        parse_size(text, "arena")


@pytest.mark.parametrize(
    ("text", "address"),
    [("host:1", Address("tcp", host="host", port=1)), ("tcp:h:0", Address("tcp", host="h")),
     ("[::1]:65535", Address("tcp", host="::1", port=65535)), ("unix:/a/b", Address("unix", path="/a/b"))],
)  # fmt: skip
def test_addresses(text: str, address: Address) -> None:
    assert parse_address(text, "listen") == address
    assert parse_address(str(address), "listen") == address


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:", ":1", "host:x", "host:-1", "host:65536", "host:1 ", "host:²", "[]:1", "h:999999999999"],
)
def test_no_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^listen=.* is not an address; write unix:/path, host:port"):
        parse_address(text, "listen")


@pytest.mark.parametrize(
    ("text", "why"),
    [("unix:a", "needs an absolute path"), ("unix:", "needs an absolute path"), ("unix:/a\0", "needs an absolute path"),
     ("unix:/" + "x" * 107, "at most 107 bytes"), ("unix:/" + "é" * 54, "at most 107 bytes")],
)  # fmt: skip
def test_no_socket_paths(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_address(text, "socket")


@pytest.mark.parametrize(
    ("text", "roles"),
    [("basic", ("basic",)), ("", ("basic",)), ("shard-home", ("basic", "shard-home")),
     (" shard-home , gateway,basic,basic ", ("basic", "gateway", "shard-home"))],
)  # fmt: skip
def test_roles(text: str, roles: tuple[str, ...]) -> None:
    assert parse_roles(text) == roles == parse_roles(",".join(roles))


@pytest.mark.parametrize("text", ["home", "basic;gateway", "Basic", "shard home", "basic,gatway"])
def test_no_roles(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^roles=.* is no role; choose among basic, gateway, shard-home$"):
        parse_roles(text)


def test_a_worker_has_all_roles_unless_told() -> None:
    assert parse_roles(WorkerConfig().roles) == ("basic", "gateway", "shard-home")


def toml(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "w.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def test_a_file_and_flags_that_win_over_it(tmp_path: Path) -> None:
    path = toml(tmp_path, 'store = "s:1"\nname = "n"\narena_bytes = "2GiB"\n')
    assert config_from_file(WorkerConfig, path, {"name": "flag", "listen": None}) == WorkerConfig(
        "s:1", "flag", arena_bytes=2 << 30
    )
    assert config_from_file(WorkerConfig, "", {}) == WorkerConfig()
    assert config_from_file(WorkerConfig, toml(tmp_path, f"arena_bytes = {5 << 20}"), {}).arena_bytes == 5 << 20
    assert config_from_file(StoreConfig, toml(tmp_path, 'data_dir = "/d"'), {"listen": "h:1"}) == StoreConfig(
        "h:1", "/d"
    )


def test_a_store_on_etcd(tmp_path: Path) -> None:
    path = toml(tmp_path, 'etcd = "a:1, [::1]:2"\netcd_prefix = "one/"\n')
    config = config_from_file(StoreConfig, path, {})
    assert [str(each) for each in parse_endpoints(config.etcd, "etcd")] == ["a:1", "[::1]:2"]
    assert StoreConfig().etcd_prefix == "tensorcast/"
    for flags, why in (({"etcd_prefix": "one"}, "etcd_prefix='one'"), ({"data_dir": "/d"}, "a store has one database")):
        with pytest.raises(ConfigError, match=why):
            config_from_file(StoreConfig, path, flags)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('arena = "1GiB"', r"unknown key 'arena'; did you mean 'arena_bytes'\?"),
        ('advertize = "h:1"', r"unknown key 'advertize'; did you mean 'advertise'\?"),
        (
            "zzz = 1",
            "unknown key 'zzz'; known keys: advertise, arena_bytes, artifact_bytes, device_bytes, devices, listen, metrics, "
            "name, page_age_max_s, roles, socket, store, tenant_bytes_max, tls_ca, tls_cert, tls_key, token_file",
        ),
        ("[worker]\nname = 'n'", "unknown key 'worker'"),
        ("name = 1", "name=1 should be text in quotes"),
        ("store = ['a:1']", r"store=\['a:1'\] should be text in quotes"),
        ("arena_bytes = 1.5", 'arena_bytes=1.5 should be a size, for example "4GiB"'),
        ("arena_bytes = true", "arena_bytes=True should be a size"),
        ('arena_bytes = "lots"', "arena_bytes='lots' is not a size"),
        ('arena_bytes = "1KiB"', "arena=1024 bytes is below the least size"),
        ("arena_bytes = -5", "arena=-5 bytes is below the least size"),
        ("name = ", "not TOML"),
        (b"name = '\xff'", "not TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str | bytes, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as error:
        config_from_file(WorkerConfig, toml(tmp_path, text), {})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "why"), [("none.toml", "No such file"), (".", "Is a directory"), ("w.toml/x", "Not a dir")]
)
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, why: str) -> None:
    toml(tmp_path, "")
    with pytest.raises(ConfigError, match=rf"^config file .*{why}"):
        config_from_file(WorkerConfig, str(tmp_path / name), {})


def test_default_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert str(default_runtime_dir()) == "/run/user/7/tensorcast" and str(default_cache_dir()) == "/c/tensorcast"
    assert StoreConfig().data_dir == "/run/user/7/tensorcast/store"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert (
        default_runtime_dir().name.startswith("tensorcast-")
        and str(default_cache_dir()) == "/home/me/.cache/tensorcast"
    )


EXTRA: dict[str, Any] = {"worker": "unix:/run/w.sock"}


def test_the_connectors_configuration() -> None:
    assert ConnectorConfig.from_extra(EXTRA) == ConnectorConfig("unix:/run/w.sock")
    every = {
        **EXTRA,
        "tenant": "t",
        "weight_version": "v",
        "lookup_deadline_s": 1,
        "save_decode": False,
        "min_load_blocks": 2,
    }
    assert ConnectorConfig.from_extra(every).lookup_deadline_s == 1


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({}, '"worker" is missing; give the address'),
        ({"worker": ""}, '"worker" is missing'),
        ({"worker": "host:1"}, "must be a Unix socket"),
        ({"worker": "/run/w.sock"}, "is not an address"),
        ({"worker": 5}, "worker=5 should be a str"),
        ({**EXTRA, "workers": 1}, r"unknown key 'workers'; did you mean 'worker'\?"),
        ({**EXTRA, "save_decode": 1}, "save_decode=1 should be a bool"),
        ({**EXTRA, "min_load_blocks": True}, "min_load_blocks=True should be a int"),
        ({**EXTRA, "min_load_blocks": 0}, "min_load_blocks at least 1"),
        ({**EXTRA, "lookup_deadline_s": 0}, "lookup_deadline_s must be above 0"),
        ({**EXTRA, "lookup_deadline_s": float("nan")}, "lookup_deadline_s must be above 0"),
    ],
)
def test_what_is_wrong_in_the_connectors_configuration_is_named(extra: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as error:
        ConnectorConfig.from_extra(extra)
    assert "\n" not in str(error.value)
