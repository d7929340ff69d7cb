"""Boards in Grafana's own JSON, made with its typed builders (grafana-foundation-sdk, schema of Grafana 11.6)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from grafana_foundation_sdk.builders import bargauge, common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as values
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmaps
from grafana_foundation_sdk.models import units

from specserve.dashboards.panels import Board, Kind, Panel, Placed, Unit

DATASOURCE = "DS_PROMETHEUS"

_UNITS: Mapping[Unit, str] = {
    "seconds": units.Seconds,
    "bytes": units.BytesIEC,
    "bytes/s": units.BytesPerSecondIEC,
    "ratio": units.PercentUnit,
    "tokens": units.Short,
    "tokens/s": "suffix: tokens/s",
    "requests/s": units.RequestsPerSecond,
    "per second": "suffix: /s",
    "count": units.Short,
}


def grafana_json(board: Board) -> str:
    """The board as a file that Grafana imports and provisions."""
    builder = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.help)
        .tags(["specserve"])
        .editable()
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(dashboard.DashboardLink("specserve").type(models.DashboardLinkType.DASHBOARDS).tags(["specserve"]))
        .with_variable(dashboard.DatasourceVariable(DATASOURCE).label("Data source").type("prometheus"))
        .with_variable(_models())
    )
    built = builder.build()
    built.panels = [_placed(number, placed) for number, placed in enumerate(board.placed(), start=1)]
    return json.dumps(built, cls=JSONEncoder, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _models() -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable("model_name")
        .label("Model")
        .datasource(_source())
        .query("label_values(specserve_worker_up, model_name)")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(text="All", value="$__all", selected=True))
    )


def _source() -> Any:
    return models.DataSourceRef(type_val="prometheus", uid=f"${{{DATASOURCE}}}")


def _placed(number: int, placed: Placed) -> Any:
    position = models.GridPos(x=placed.x, y=placed.y, w=placed.width, h=placed.height)
    if isinstance(placed.item, str):
        row = dashboard.Row(placed.item).id(number).build()
        row.grid_pos = position
        return row
    panel = _BUILDERS[placed.item.kind]().title(placed.item.title).description(placed.item.help)
    panel.datasource(_source()).unit(_UNITS[placed.item.unit]).id(number).grid_pos(position)
    if placed.item.unit == "ratio":
        panel.min(0.0)
    for index, query in enumerate(placed.item.queries):
        panel.with_target(_query(placed.item, query.expr, query.legend, chr(ord("A") + index)))
    return panel.build()


def _query(panel: Panel, expr: str, legend: str, name: str) -> prometheus.Dataquery:
    query = prometheus.Dataquery().expr(expr).legend_format(legend or "__auto").ref_id(name)
    if panel.kind == "bars":
        query.instant()
    else:
        query.range()
    return query.format("heatmap") if panel.kind == "heatmap" else query


def _lines() -> Any:
    legend = common.VizLegendOptions().display_mode(values.LegendDisplayMode.LIST)
    tooltip = common.VizTooltipOptions().mode(values.TooltipDisplayMode.MULTI)
    panel = timeseries.Panel().line_width(1.0).fill_opacity(8.0).show_points(values.VisibilityMode.NEVER)
    return panel.legend(legend.placement(values.LegendPlacement.BOTTOM).show_legend(True)).tooltip(tooltip)


def _stacked() -> Any:
    return _lines().fill_opacity(40.0).stacking(common.StackingConfig().mode(values.StackingMode.NORMAL))


def _reduced(panel: Any) -> Any:
    return panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))


def _heatmap() -> Any:
    return heatmap.Panel().color(heatmap.HeatmapColorOptions().mode(heatmaps.HeatmapColorMode.SCHEME).scheme("Blues"))


_BUILDERS: Mapping[Kind, Callable[[], Any]] = {
    "lines": _lines,
    "stacked": _stacked,
    "number": lambda: _reduced(stat.Panel().graph_mode(values.BigValueGraphMode.AREA)),
    "bars": lambda: _reduced(bargauge.Panel().orientation(values.VizOrientation.HORIZONTAL)),
    "heatmap": _heatmap,
}
