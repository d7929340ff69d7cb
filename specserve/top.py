"""`specserve top`: what the status page shows, in a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from specserve.chat import server_url
from specserve.errors import SpecserveError, Unavailable

_BLOCKS = " ▁▂▃▄▅▆▇█"
_COLUMNS = 60
_EVERY_S = 1.0


class Top:
    """Watches one server."""

    def __init__(self, url: str, console: Console | None = None, *, api_key: str | None = None) -> None:
        """url is the server's, with or without http:// and a trailing /v1. Raises ConfigError when it is not one."""
        self._url = server_url(url)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(base_url=self._url, timeout=5, headers=headers)
        self._console = console or Console()

    def run(self, *, once: bool = False) -> None:
        """Draw every second until interrupted. Raises Unavailable when there is no server."""
        if once:
            self._console.print(picture(self._status()))
            return
        with Live(picture(self._status()), console=self._console, auto_refresh=False) as live:
            while True:
                time.sleep(_EVERY_S)
                live.update(picture(self._status()), refresh=True)

    def _status(self) -> dict[str, Any]:
        try:
            reply = self._client.get("/status.json")
        except httpx.HTTPError as error:
            raise Unavailable(
                f"no answer from {self._url} ({error}); is `specserve serve` running there (--url)?"
            ) from None
        if reply.status_code != 200:
            raise SpecserveError(
                f"{self._url}/status.json answered {reply.status_code}; is --api-key, or SPECSERVE_API_KEY, right?"
            )
        found: dict[str, Any] = reply.json()
        return found


def picture(status: dict[str, Any]) -> RenderableType:
    """One picture of a status."""
    history, levels = status["history"], status["levels"] or {}
    head = Text.assemble((f"{status['model']} ", "bold"), f"drafts: {status['told_drafts']}, ")
    head.append(f"rule {status['rule']} · {status['health']['status']} {status['health']['detail']}")
    return Group(head, _workers(status), _levels(levels), _flows(history))


def _workers(status: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("worker", "device", "state", "computes", ""):
        table.add_column(title)
    for role, about in status["workers"].items():
        busy = sum(status["history"][f"{role}_busy_s"][-5:]) / 5
        table.add_row(role, about.get("device", ""), "up" if about["up"] else "away", f"{busy:.0%}", _bar(busy))
    return table


def _levels(levels: dict[str, Any]) -> Text:
    if not levels:
        return Text("nothing has run yet", "dim")
    kv = levels["target_blocks_held"] / max(1, levels["target_blocks_capacity"])
    return Text(
        f"{levels['running']} running, {levels['waiting']} waiting · slots {levels['slots_held']} of "
        f"{levels['slots_capacity']} · KV of the target {kv:.0%}"
    )


def _flows(history: dict[str, list[float]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    rows = {
        "tokens/s": (f"{sum(history['tokens'][-5:]) / 5:.1f}", history["tokens"]),
        "acceptance": _share(history["kept"], history["drafted"]),
        "overlap": _share(history["overlap_s"], history["target_busy_s"]),
        "running": (f"{history['running'][-1] if history['running'] else 0:.0f}", history["running"]),
    }
    for name, (now, column) in rows.items():
        table.add_row(Text(name, "dim"), now, Text(spark(column[-_COLUMNS:]), "cyan"))
    return table


def _share(part: Sequence[float], whole: Sequence[float]) -> tuple[str, list[float]]:
    below = sum(whole[-30:])
    shown = f"{sum(part[-30:]) / below:.0%}" if below else "–"
    return shown, [p / w if w else 0.0 for p, w in zip(part, whole, strict=True)]


def spark(values: Sequence[float]) -> str:
    """One character per value, as high as its share of the highest."""
    highest = max(values, default=0)
    return "".join(_BLOCKS[round(8 * value / highest) if highest else 0] for value in values)


def _bar(share: float) -> str:
    full = round(20 * min(1.0, share))
    return "█" * full + "░" * (20 - full)
