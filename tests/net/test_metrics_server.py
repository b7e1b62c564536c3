"""The metrics server: what it serves, and when a process is ill."""

from collections.abc import Iterator, Sequence

import pytest

from tensorcast_connector.errors import ConfigError
from tensorcast_connector.net.histogram import Histogram
from tensorcast_connector.net.metrics_server import Family, Value, serve_metrics
from tensorcast_connector.types import Address
from tests.scrape import get, scrape

ANYWHERE = Address("tcp", host="127.0.0.1")


class Part:
    """A `Source`."""

    families = (
        Family("counter", "part_things_total", "Things.", ("kind",)),
        Family("gauge", "part_level", "Level."),
        Family("histogram", "part_seconds", "Time.", ("operation",)),
    )

    def __init__(self) -> None:
        self.reason = ""
        self.refreshed = 0
        self.seconds = Histogram((0.5, 1.0))

    async def refresh(self) -> None:
        self.refreshed += 1

    def values(self) -> Iterator[tuple[str, Sequence[str], Value]]:
        yield "part_things_total", ("a",), 3
        yield "part_things_total", ("b",), 4
        yield "part_level", (), float(self.refreshed)
        yield "part_seconds", ("x",), self.seconds

    def ill(self) -> str:
        return self.reason


async def test_counters_gauges_and_histograms_are_served() -> None:
    part = Part()
    for seconds in (0.1, 0.5, 0.7, 9.0):
        part.seconds.observe(seconds)
    listener = await serve_metrics(ANYWHERE, [part])
    try:
        assert listener.address.port
        found = await scrape(listener.address)
        assert {name: kind for name, kind in found.kinds.items() if name.startswith("part")} == {
            "part_things": "counter", "part_level": "gauge", "part_seconds": "histogram",
        }  # fmt: skip
        assert found.texts["part_things"] == "Things."
        assert found.value("part_things_total", kind="a") == 3 and found.value("part_things_total", kind="b") == 4
        assert found.value("part_level") == 1, "it was brought up to date before it was read"
        buckets = {each: found.value("part_seconds_bucket", operation="x", le=each) for each in ("0.5", "1.0", "+Inf")}
        assert buckets == {"0.5": 2, "1.0": 3, "+Inf": 4}
        assert found.value("part_seconds_count", operation="x") == 4
        assert found.value("part_seconds_sum", operation="x") == pytest.approx(10.3)
        assert found.value("process_resident_memory_bytes") > 1 << 20
    finally:
        await listener.close()


async def test_a_process_that_is_still_starting_is_not_well() -> None:
    """Its port is taken before anything is made; what it has comes later."""
    parts: list[Part] = []
    listener = await serve_metrics(ANYWHERE, parts)
    try:
        assert (await get(listener.address, "/healthz"))[::2] == (503, "it does not serve\n")
        assert "part_level" not in (await scrape(listener.address)).kinds
        parts.append(Part())
        assert (await get(listener.address, "/healthz"))[::2] == (200, "ok\n")
        assert (await scrape(listener.address)).value("part_level") == 2
    finally:
        await listener.close()


async def test_health_is_200_or_503_and_the_reason() -> None:
    well, part = Part(), Part()
    listener = await serve_metrics(ANYWHERE, [well, part])
    try:
        assert (await get(listener.address, "/healthz"))[::2] == (200, "ok\n")
        part.reason = "no database"
        assert (await get(listener.address, "/healthz"))[::2] == (503, "no database\n")
        assert (await get(listener.address, "/metrics"))[0] == 200
        assert (await get(listener.address, "/other"))[0] == 404
    finally:
        await listener.close()


async def test_an_address_that_is_taken_is_one_line() -> None:
    listener = await serve_metrics(ANYWHERE, [Part()])
    try:
        with pytest.raises(ConfigError, match=rf"^metrics='{listener.address}': cannot listen there: .*in use"):
            await serve_metrics(listener.address, [Part()])
    finally:
        await listener.close()
    await (await serve_metrics(listener.address, [Part()])).close()
