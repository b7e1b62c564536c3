"""What the documents say in their tables, for tests that compare it with what the processes do."""

import re
from pathlib import Path

from tensorcast_connector.net.metrics_server import Family
from tests.scrape import Scraped

DOCS = Path(__file__).resolve().parent.parent / "docs"


def section(page: str, title: str) -> str:
    """The text of a page below a heading of the second level."""
    return (DOCS / page).read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of the tables in `text`, without headings."""
    lines = [line.strip().strip("|") for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split(" | ")] for line in lines]
    return [each for each in cells if each[0].startswith("`")]


def families(title: str) -> list[Family]:
    """The metrics documented in a section of docs/metrics.md; every one has a unit."""
    found = []
    for name, kind, labels, unit, text in rows(section("metrics.md", title)):
        assert unit, name
        plain = re.sub(r"\([^)]*\)", "", labels)
        found.append(Family(kind, name.strip("`"), text, tuple(re.findall(r"`(\w+)`", plain))))
    return found


def label_values(title: str) -> dict[str, set[str]]:
    """Of the metrics whose only label has documented values: these."""
    return {
        name.strip("`"): set(re.split(r", ", values.group(1)))
        for name, _, labels, *_ in rows(section("metrics.md", title))
        if (values := re.search(r"\(([^)]*)\)", labels))
    }


def check_documented(found: Scraped, title: str, prefix: str) -> None:
    """Exactly the documented families, labels and label values are exported, and each family has a value."""
    values = label_values(title)
    for family in families(title):
        name = family.name.removesuffix("_total")
        assert found.kinds.pop(name) == family.kind and found.texts[name] == family.text
        sample = f"{name}_count" if family.kind == "histogram" else family.name
        labels = found.labels(sample)
        assert labels, f"{name} has no value"
        assert all(set(each) == set(family.labels) for each in labels)
        if family.name in values:
            assert {each[family.labels[0]] for each in labels} == values[family.name], name
    assert not [name for name in found.kinds if name.startswith(prefix)], "these are not documented"
