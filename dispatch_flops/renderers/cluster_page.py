"""HTML page of a cluster, the sibling of a profile's page: ranks, mesh, groups and modules."""

from __future__ import annotations

from dispatch_flops.profile.cluster import ClusterProfile
from dispatch_flops.renderers.explanations import counting
from dispatch_flops.renderers.html.cluster_data import cluster_data
from dispatch_flops.renderers.html.document import document
from dispatch_flops.renderers.text import one_line
from dispatch_flops.renderers.view import View

__all__ = ["render"]

_SCRIPTS = ("tree.js", "table.js", "tree_table.js", "cluster.js")


def render(cluster: ClusterProfile, view: View | None = None) -> str:
    """Return the text of a self-contained HTML file with the figures of ``cluster_table``.

    The reader chooses the figure and the phase. Up to 512 ranks have a bar each; of more, each
    set of equal ranks has one. Modules are a tree for each pipeline stage.

    view: ``depth`` of modules, ``phase`` (the only one shown) and ``title``.

    Example::

        page = cluster_page.render(cluster, View(depth=2, title="nightly run"))
        Path("cluster.html").write_text(page)
    """
    view = view or View()
    first = next(iter(cluster.profiles.values()))
    heading = one_line(view.title or first.root.class_name) or "Cluster"
    return document(
        title=heading,
        kind="cluster",
        body="cluster.html",
        scripts=_SCRIPTS,
        data=cluster_data(cluster, view, heading),
        texts={"counting": counting(first.run.flops)},
    )
