"""From a ``Profile`` to a str, bytes or a dict; renderers never print and never import torch.

Formats of text have one signature, ``render(profile, view=None) -> str``.

profile: a ``Profile``.
cluster: a ``ClusterProfile``, in the formats of merged profiles.
view: a ``View``, which says how much is shown, and how; None (the default) shows what the format
    shows by default.

Formats of one profile:

    overview      totals, a line per module, the top operators and remarks
    table         modules, operators or uncounted operators, plain or Markdown
    communication what each rank sends and receives, by module and group
    memory_table  the peak of memory, what it consists of, and memory by module
    deepspeed     DeepSpeed's three parts and the operators
    csv           a row per module or per operator
    collapsed     stacks for flame-graph tools
    chrome_trace  a timeline for Perfetto and chrome://tracing
    html          a self-contained page for the browser
    notebook      the HTML that a notebook shows

Merged profiles have two formats of text, ``render(cluster, view=None) -> str``.

    cluster_table   figures over ranks, ranks, mesh dimensions and modules, plain or Markdown
    cluster_page    the same figures as a page for the browser

So have plans: ``plan_table.render(plan, style="plain")``, ``plan_page.render(plan, view=None)``.

    plan_table      choices side by side, plain or Markdown
    plan_page       the same figures as a page for the browser, with bars of memory and time

The others return what their readers take.

    dataframe     pandas data frames (extra: pandas)
    plots         bytes of a PNG, SVG or PDF file (extra: plots)
    scalars       a dict of named numbers for loggers

JSON is ``to_json`` of profiles, of merged profiles, of plans and of profiles of generation.
"""

from dispatch_flops.renderers import (
    chrome_trace,
    cluster_page,
    cluster_table,
    collapsed,
    communication,
    csv,
    dataframe,
    deepspeed,
    html,
    memory_table,
    notebook,
    overview,
    plan_page,
    plan_table,
    plots,
    scalars,
    table,
)
from dispatch_flops.renderers.view import View

__all__ = [
    "View",
    "chrome_trace",
    "cluster_page",
    "cluster_table",
    "collapsed",
    "communication",
    "csv",
    "dataframe",
    "deepspeed",
    "html",
    "memory_table",
    "notebook",
    "overview",
    "plan_page",
    "plan_table",
    "plots",
    "scalars",
    "table",
]
