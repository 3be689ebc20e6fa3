"""Formats that several ranks of one run can be shown in."""

from __future__ import annotations

from argparse import Namespace

from dispatch_flops.cli.formats import format_named, table_style
from dispatch_flops.cli.output import emit
from dispatch_flops.errors import TargetError
from dispatch_flops.profile.cluster import ClusterProfile
from dispatch_flops.renderers import View, cluster_communication, cluster_page, cluster_table

DEFAULT = "table"
CLUSTER_FORMATS = (DEFAULT, "markdown", "comm", "json", "html")


def show_cluster(cluster: ClusterProfile, options: Namespace) -> None:
    """Print the cluster, or write it to a file, in the format that the options name."""
    output: str | None = options.output
    name = format_named(options, CLUSTER_FORMATS)
    view = View(depth=options.depth, style=table_style(name), phase=getattr(options, "phase", None))
    match name:
        case "json":
            text = cluster.to_json()
        case "html":
            text = cluster_page.render(cluster, view)
        case "comm":
            text = cluster_communication.render(cluster, view)
        case "table" | "markdown":
            text = cluster_table.render(cluster, view)
        case _:
            raise TargetError(
                f"--format {name} is not available for several ranks; use one of "
                f"{', '.join(CLUSTER_FORMATS)}"
            )
    emit(text, output)
