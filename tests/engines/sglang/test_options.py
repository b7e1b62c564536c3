"""What a user may say to the storage, and how a mistake is told."""

import pytest

from tensorcast_connector.config import LOOKUP_DEADLINE_S, STORAGE_TRANSFER_DEADLINE_S
from tensorcast_connector.engines.options import StorageConfig
from tensorcast_connector.errors import ConfigError

WORKER = "unix:/run/worker.sock"
SGLANGS = {"backend_name": "x", "module_path": "y", "class_name": "z", "interface_v1": 1, "prefetch_threshold": 64}


def test_only_the_worker_is_needed_and_sglangs_own_keys_are_left_to_it() -> None:
    assert StorageConfig.from_extra({"worker": WORKER, **SGLANGS}) == StorageConfig(
        WORKER, "default", "", LOOKUP_DEADLINE_S, STORAGE_TRANSFER_DEADLINE_S
    )


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({}, '"worker" is missing'),
        ({"worker": "tcp:1.2.3.4:5"}, "must be a Unix socket"),
        ({"worker": WORKER, "wroker": WORKER}, "did you mean 'worker'"),
        ({"worker": WORKER, "tenant": 5}, "tenant=5 should be a str"),
        ({"worker": WORKER, "tenant": "a/b"}, "without a slash"),
        ({"worker": WORKER, "lookup_deadline_s": 0}, "must be above 0"),
        (
            {"worker": WORKER, "transfer_deadline_s": float("inf")},
            "transfer_deadline_s must be above 0 and at most 3600, not",
        ),
        ({"worker": WORKER, "lookup_deadline_s": float("nan")}, "lookup_deadline_s must be above 0"),
        ({"worker": WORKER, "transfer_deadline_s": 10**12}, "must be above 0 and at most 3600"),
        ({"worker": WORKER, "transfer_deadline_s": True}, "should be a float"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(extra: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        StorageConfig.from_extra(extra)
    assert told in str(raised.value) and "hicache_storage_backend_extra_config" in str(raised.value)
    assert "\n" not in str(raised.value)
