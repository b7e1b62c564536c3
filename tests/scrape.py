"""Reading a process's metrics as Prometheus does."""

import aiohttp
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tensorcast_connector.types import Address

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def get(address: Address, path: str, accept: str = "") -> tuple[int, str, str]:
    """(status, content type, body)."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{address}{path}", headers={"Accept": accept}) as got,
    ):
        return got.status, got.headers["Content-Type"], await got.text()


class Scraped:
    """What a scrape says."""

    def __init__(self, text: str, openmetrics: bool = False) -> None:
        families = list(parse_openmetrics(text) if openmetrics else parse_text(text))
        self.kinds = {each.name: each.type for each in families}
        self.texts = {each.name: each.documentation for each in families}
        self.samples: Samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for each in families
            for sample in each.samples
        }

    def value(self, name: str, **labels: str) -> float:
        """Of one sample."""
        return self.samples[name, frozenset(labels.items())]

    def labels(self, name: str) -> list[dict[str, str]]:
        """The labels of the samples of one name."""
        return [dict(labels) for sample, labels in self.samples if sample == name]


async def scrape(address: Address) -> Scraped:
    """All metrics now; what is said in the newer format is the same."""
    status, kind, text = await get(address, "/metrics")
    assert status == 200 and kind.startswith("text/plain"), (status, kind)
    status, kind, newer = await get(address, "/metrics", OPENMETRICS)
    assert status == 200 and kind.startswith("application/openmetrics-text"), (status, kind)
    found, again = Scraped(text), Scraped(newer, openmetrics=True)
    assert found.kinds == again.kinds and set(found.samples) == set(again.samples)
    return found
