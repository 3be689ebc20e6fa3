"""From a ``Profile`` to a str, bytes or a dict; renderers never print and never import torch."""
