"""Wrong engine options give one line; right ones give a configuration."""

import json

import pytest

from tensorcast_connector.engines.options import LoaderConfig
from tensorcast_connector.engines.vllm.plugin import check_command_line, check_transfer_config
from tensorcast_connector.errors import ConfigError

GOOD = {
    "kv_connector": "TensorcastConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"worker": "unix:/run/w.sock"},
}


def with_extra(**extra: object) -> dict[str, object]:
    return {**GOOD, "kv_connector_extra_config": {"worker": "unix:/run/w.sock", **extra}}


def test_a_right_configuration() -> None:
    config = check_transfer_config(with_extra(tenant="blue", lookup_deadline_s=2, save_decode=False, min_load_blocks=4))
    assert config is not None
    assert (config.worker, config.tenant, config.min_load_blocks) == ("unix:/run/w.sock", "blue", 4)
    assert check_transfer_config({"kv_connector": "NixlConnector"}) is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**GOOD, "kv_connector_extra_config": {}}, ["worker", "missing", "unix:"]),
        ({**GOOD, "kv_connector_extra_config": None}, ["worker", "missing"]),
        ({**GOOD, "kv_connector_extra_config": ["worker"]}, ["kv_connector_extra_config", "object"]),
        ({**GOOD, "kv_load_failure_policy": "fail"}, ["kv_load_failure_policy", '"fail"', "recompute"]),
        ({key: GOOD[key] for key in GOOD if key != "kv_load_failure_policy"}, ["kv_load_failure_policy", "recompute"]),
        (with_extra(woker="x"), ["unknown key 'woker'", "did you mean 'worker'"]),
        (with_extra(zzz=1), ["unknown key 'zzz'", "known keys", "tenant"]),
        (with_extra(worker="127.0.0.1:9"), ["worker", "Unix socket"]),
        (with_extra(worker="unix:relative.sock"), ["worker", "absolute"]),
        (with_extra(worker="unix:/" + "x" * 200), ["worker", "107"]),
        (with_extra(worker=7), ["worker=7", "str"]),
        (with_extra(save_decode="yes"), ["save_decode='yes'", "bool"]),
        (with_extra(min_load_blocks=True), ["min_load_blocks=True", "int"]),
        (with_extra(min_load_blocks=0), ["min_load_blocks"]),
        (with_extra(lookup_deadline_s=-1.0), ["lookup_deadline_s"]),
    ],
)
def test_a_wrong_one_is_one_line_that_names_the_field(config: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_transfer_config(config)
    line = str(caught.value)
    assert "\n" not in line
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    "argv",
    [
        ["vllm", "serve", "M", "--kv-transfer-config", json.dumps({**GOOD, "kv_connector_extra_config": {}})],
        ["vllm", "serve", "M", "--kv-transfer-config=" + json.dumps({**GOOD, "kv_connector_extra_config": {}})],
        ["vllm", "serve", "M", "--kv_transfer_config", json.dumps({**GOOD, "kv_connector_extra_config": {}})],
    ],
)
def test_the_command_line_is_checked_in_every_spelling(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="worker"):
        check_command_line(argv)


def test_the_command_line_of_others_is_none_of_our_business() -> None:
    check_command_line(["vllm", "serve", "M"])
    check_command_line(["vllm", "serve", "M", "--kv-transfer-config"])
    check_command_line(["vllm", "serve", "M", "--kv-transfer-config", "{not json"])
    check_command_line(["vllm", "serve", "M", "--kv-transfer-config", '{"kv_connector": "NixlConnector"}'])
    check_command_line(["vllm", "serve", "M", "--kv-transfer-config", json.dumps(GOOD)])


def test_options_of_the_loader() -> None:
    assert LoaderConfig.from_extra({}) == LoaderConfig()
    given = {"worker": "unix:/run/w.sock", "tenant": "blue", "source": "policy:7", "publish": False, "threads": 4}
    config = LoaderConfig.from_extra({**given, "weight_version": "7"})
    assert (config.source, config.publish, config.threads, config.weight_version) == ("policy:7", False, 4, "7")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"woker": "unix:/w"}, ["unknown key 'woker'", "did you mean 'worker'"]),
        ({"zzz": 1}, ["unknown key 'zzz'", "known keys", "publish"]),
        ({"worker": "127.0.0.1:9"}, ["worker", "Unix socket"]),
        ({"worker": 7}, ["worker=7", "str"]),
        ({"publish": 1}, ["publish=1", "bool"]),
        ({"threads": 0}, ["threads=0", "from 1"]),
        ({"threads": True}, ["threads=True", "int"]),
        ({"source": "policy"}, ["source='policy'", "worker"]),
        ({"worker": "unix:/w", "tenant": "a/b"}, ["tenant", "slash"]),
        ([1], ["JSON object"]),
    ],
)
@pytest.mark.parametrize("spelling", ["--model-loader-extra-config", "--model_loader_extra_config"])
def test_wrong_ones_are_one_line_on_the_command_line_too(extra: object, words: list[str], spelling: str) -> None:
    argv = ["vllm", "serve", "M", "--load-format", "tensorcast", f"{spelling}={json.dumps(extra)}"]
    for check in (lambda: LoaderConfig.from_extra(extra), lambda: check_command_line(argv)):
        with pytest.raises(ConfigError) as caught:
            check()
        assert "\n" not in str(caught.value)
        for word in ["model_loader_extra_config", *words]:
            assert word in str(caught.value)
    check_command_line([*argv[:4], "runai_streamer", *argv[5:]])
