"""HTML page of a cluster: the tables, without scripts and without requests."""

from __future__ import annotations

import html
from collections.abc import Iterator

from dispatch_flops.profile.cluster import ClusterProfile
from dispatch_flops.renderers.cluster_table import Section, heading, sections
from dispatch_flops.renderers.text import one_line
from dispatch_flops.renderers.view import View
from dispatch_flops.units import ratio

__all__ = ["render"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_STYLE = """
body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;
color-scheme:light dark}
h2{font-size:1.1rem;margin:2rem 0 .5rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:2px 12px;text-align:right;white-space:nowrap;border-bottom:1px solid #8884}
th.text,td.text{text-align:left}
.bars{display:flex;align-items:flex-end;gap:1px;height:80px}
.bars div{flex:1;max-width:24px;background:#4878a8}
"""
_MOST_BARS = 512


def render(cluster: ClusterProfile, view: View | None = None) -> str:
    """Return the text of a self-contained HTML file, with the tables of ``cluster_table``.

    Above them, a bar for each rank shows its FLOPs; up to 512 ranks have one.

    view: ``depth`` of modules, ``phase`` and ``title``.

    Example::

        page = cluster_page.render(cluster, View(depth=2, title="nightly run"))
        Path("cluster.html").write_text(page)
    """
    view = view or View()
    model = next(iter(cluster.profiles.values())).root.class_name
    title = html.escape(one_line(view.title or model) or "Cluster")
    body = "".join(
        [
            f"<h1>{title}</h1>",
            *(f"<p>{html.escape(line.removeprefix('- '))}</p>" for line in heading(cluster)),
            *_bars(cluster, view),
            *(_section(section) for section in sections(cluster, view)),
        ]
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(_POLICY)}">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def _bars(cluster: ClusterProfile, view: View) -> Iterator[str]:
    most = cluster.maximum("flops", view.phase)
    if not most or len(cluster.ranks) > _MOST_BARS:
        return
    yield '<h2>FLOPs of each rank</h2><div class="bars">'
    for rank in cluster.ranks:
        height = ratio(cluster.value(rank, "flops", view.phase), most) or 0.0
        yield f'<div title="rank {rank}" style="height:{100 * height:.2f}%"></div>'
    yield "</div>"


def _section(section: Section) -> str:
    rows = "".join(_row("td", row, section.texts) for row in section.rows)
    return (
        f"<h2>{html.escape(section.title)}</h2><table><thead>"
        f"{_row('th', section.header, section.texts)}</thead><tbody>{rows}</tbody></table>"
    )


def _row(tag: str, cells: tuple[str, ...] | list[str], texts: int) -> str:
    starts = (
        f'<{tag} class="text">' if column < texts else f"<{tag}>" for column in range(len(cells))
    )
    marked = (
        f"{start}{html.escape(one_line(cell))}</{tag}>"
        for start, cell in zip(starts, cells, strict=True)
    )
    return f"<tr>{''.join(marked)}</tr>"
