"""The adaptor of docs/service.md, as it stands there, against a real worker; and what attaching an engine refuses."""

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

import tensorcast_connector as tensorcast
from tensorcast_connector import adaptor
from tensorcast_connector.adaptor import attach_instance
from tensorcast_connector.client.instance import InstanceLink
from tests.client.callers import Pool
from tests.cluster import plane
from tests.documented import section
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
TITLE = "An adaptor for an engine of your own"


class Nothing:
    """An adaptor for steps that never come."""

    async def publish(self, arguments: object, context: object) -> dict[str, object]:
        return {}

    hydrate = evict_local = transform_into = publish


@pytest.mark.slow
async def test_the_documented_adaptor_runs(pool: Pool, tmp_path: Path) -> None:
    [a] = await pool.start()
    [code] = re.findall(r"```python\n(.*?)```", section("service.md", TITLE), re.DOTALL)
    (tmp_path / "adaptor.py").write_text(code)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", str(tmp_path / "adaptor.py"), str(a.socket), env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 50)
    assert process.returncode == 0 and not err, err.decode()
    assert out.decode().splitlines() == [
        "the plan: 1 tensor, 12 bytes",
        "rollout has [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] float16 and trainer {}",
    ]
    session = await pool.session(a)
    assert [each.names for each in await session.list_artifacts()] == [["policy:1"]]
    await until(lambda: not plane(a).view.instances)


async def test_an_engine_is_attached_as_long_as_its_link_is_open(pool: Pool) -> None:
    [a] = await pool.start()
    async with await attach_instance(
        str(a.socket), Nothing(), instance_id="i", engine="mine", model="m", namespace="n", tenant="t"
    ) as link:
        assert isinstance(link, InstanceLink)
        await until(lambda: plane(a).view.instances)
        [listed] = plane(a).view.instances.values()
        assert (listed.instance_id, listed.engine, listed.model, listed.namespace, listed.tenant) == (
            "i",
            "mine",
            "m",
            "n",
            "t",
        )
    await until(lambda: not plane(a).view.instances)


async def test_where_no_engine_can_be_attached(pool: Pool, tmp_path: Path) -> None:
    [a] = await pool.start()
    for address, kind, message in [
        (str(a.address), tensorcast.ConfigError, r"an engine attaches to the worker of its own host, at unix:/path"),
        ("nowhere", tensorcast.ConfigError, "is not an address"),
        (f"unix:{tmp_path}/none.sock", tensorcast.Unavailable, "cannot connect"),
    ]:
        with pytest.raises(kind, match=message):
            await attach_instance(address, Nothing(), instance_id="i")


def test_all_that_an_adaptor_needs_is_exported() -> None:
    needed = {"AttachInstance", "InstanceAdaptor", "InstanceLink", "StepContext", "attach_instance"}
    assert set(adaptor.__all__) == needed and adaptor.InstanceLink is InstanceLink
    assert {"connect", "NotFound"} <= set(tensorcast.__all__), "and these beside them"
    assert {"PLAN_BYTES_MAX", "asyncio.to_thread", "context.key"} <= set(re.findall(r"[\w.]+", adaptor.__doc__ or ""))


def test_a_program_has_few_names_to_learn() -> None:
    """Each is what its module calls it. Types that are only ever given to a program need no name there."""
    for name in tensorcast.__all__:
        assert getattr(tensorcast, name).__name__ == name
    assert len(tensorcast.__all__) <= 25
