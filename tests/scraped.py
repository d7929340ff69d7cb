"""Reading the text that /metrics answers with."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


class Scrape:
    """One scrape: series by name and labels."""

    def __init__(self, text: str) -> None:
        self.types: dict[str, str] = {}
        self.values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.types[sample.name] = family.type
                self.values[sample.name, frozenset(sample.labels.items())] = sample.value

    def all(self, name: str, **labels: str) -> dict[frozenset[tuple[str, str]], float]:
        """Every series of a name whose labels include these."""
        wanted = set(labels.items())
        return {key: value for (found, key), value in self.values.items() if found == name and wanted <= key}

    def sum(self, name: str, **labels: str) -> float:
        """The sum over those series, of which there must be one at least."""
        found = self.all(name, **labels)
        assert found, f"no series {name} with {labels}"
        return sum(found.values())

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Sums by one label."""
        result: dict[str, float] = {}
        for key, value in self.all(name, **labels).items():
            result[dict(key)[label]] = result.get(dict(key)[label], 0.0) + value
        return result

    def fell(self, before: Scrape) -> dict[tuple[str, frozenset[tuple[str, str]]], tuple[float, float]]:
        """Counters (histograms are made of them) that are lower than before, or gone."""
        counters = {k: v for k, v in before.values.items() if before.types[k[0]] in ("counter", "histogram")}
        return {k: (v, self.values.get(k, -1.0)) for k, v in counters.items() if self.values.get(k, -1.0) < v}
