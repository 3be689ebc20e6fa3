"""Build the API reference from the docstrings of the public names.

    python .ci/reference.py [FOLDER]

The pages are written to FOLDER, by default ``build/reference``; the extra ``docs`` has what this
needs. The exit status is 1 if a public name has no docstring, or if a docstring refers to a name
that does not exist.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pdoc.doc
import pdoc.doc_ast
import pdoc.doc_types
import pdoc.docstrings
import pdoc.render
from jinja2 import pass_context

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from tests.helpers import public_names  # noqa: E402

_PARAMETER = re.compile(r"(?P<names>\*{0,2}[a-z_]\w*(?:, \*{0,2}[a-z_]\w*)*): (?P<text>.*)")
_ERROR = re.compile(r" +(?P<names>[A-Z]\w+(?:Error|Warning)): (?P<text>.*)")
_CODE = re.compile(r"(?<!`)``([^`]+)``(?!`)")
_REFERENCE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_CLASS_NAME = re.compile(r"(?:[A-Z][a-z0-9]+){2,}")


def main(folder: str = "build/reference") -> int:
    """Write the pages; return 1 if something is undocumented or a reference has no target."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # of fields of dataclasses, whose ``__module__`` is the public path
        warnings.filterwarnings("ignore", "Cannot determine where")
        modules = documented()
        found = [*undocumented(modules), *unresolved(modules)]
        write(modules, REPOSITORY / folder)
    for problem in found:
        print(problem, file=sys.stderr)
    print(f"{len(modules)} pages in {folder}")
    return 1 if found else 0


def documented() -> dict[str, pdoc.doc.Module]:
    """Return the modules of the reference, each with its public names alone."""
    pdoc.doc.safe_eval_type = pdoc.doc_types.safe_eval_type = _annotation
    _stand_in_for_lightning()
    names = {name: module.__all__ for name, module in public_names.modules().items()}
    names |= {"dispatch_flops.integrations": [], **public_names.values()}
    modules = {name: pdoc.doc.Module(importlib.import_module(name)) for name in names}
    for name, module in modules.items():
        # Some names are imported when they are first used.
        module._member_objects = {public: getattr(module.obj, public) for public in names[name]}
        module._var_docstrings.update(_docstrings_of_constants(name))
        module.submodules = [modules[other] for other in names if other.rpartition(".")[0] == name]
    return modules


def _docstrings_of_constants(package: str) -> dict[str, str]:
    """Return the texts below the constants that the files of a package define."""
    files = [found for name, found in sys.modules.items() if name.rpartition(".")[0] == package]
    texts: dict[str, str] = {}
    for file in files:
        texts |= pdoc.doc_ast.walk_tree(file).var_docstrings
    return texts


def _stand_in_for_lightning() -> None:
    """Let the page of Lightning's callback be built where Lightning is not installed."""
    try:
        import lightning  # noqa: F401
    except ImportError:
        callbacks = ModuleType("lightning.pytorch.callbacks")
        callbacks.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
        sys.modules["lightning.pytorch.callbacks"] = callbacks


class _AsWritten:
    """An annotation that is shown as in the source, with public names linked."""

    def __init__(self, annotation: str) -> None:
        self.text = re.sub(r"\w+", lambda word: _full_name(word[0]), annotation)

    def __repr__(self) -> str:
        return self.text


def _full_name(word: str) -> str:
    is_public = word in public_names.modules()["dispatch_flops"].__all__
    return f"dispatch_flops.{word}" if is_public and word[0].isupper() else word


def _annotation(annotation: Any, *_: Any) -> Any:
    """Replace pdoc's evaluation, for which a class's ``__module__`` must be where it is written."""
    return _AsWritten(annotation) if isinstance(annotation, str) else annotation


def undocumented(modules: Mapping[str, pdoc.doc.Module]) -> Iterator[str]:
    """Yield a line for each public name without a docstring; classes describe their fields."""
    for module in modules.values():
        for member in shown(module):
            is_field = isinstance(member, pdoc.doc.Variable) and "." in member.qualname
            if not (member.docstring.strip() or is_field or member.kind == "module"):
                yield f"{member.fullname} has no docstring"


def shown(namespace: Any) -> Iterator[pdoc.doc.Doc[Any]]:
    """Yield the public members of a module, and of its classes."""
    for member in namespace.own_members:
        if not member.name.startswith("_"):
            yield member
            if isinstance(member, pdoc.doc.Class):
                yield from shown(member)


def unresolved(modules: Mapping[str, pdoc.doc.Module]) -> Iterator[str]:
    """Yield a line for each name in double backquotes that begins like a name of ours and is none.

    Those are names whose first part is public, and names of classes.
    """
    names = {"dispatch_flops": modules["dispatch_flops"].obj}
    for module in modules.values():
        for name, found in module._member_objects.items():
            names.setdefault(name, found)
    for module in modules.values():
        for member in (module, *shown(module)):
            for text in _CODE.findall(member.docstring):
                if _REFERENCE.fullmatch(text.removesuffix("()")) and not _exists(text, names):
                    yield f"{member.fullname}: ``{text}`` does not exist"


def _exists(text: str, names: Mapping[str, Any]) -> bool:
    first, *rest = text.removesuffix("()").split(".")
    if first not in names:
        return not _CLASS_NAME.fullmatch(first) or any(
            hasattr(sys.modules[room], first)
            for room in ("builtins", "torch", "torch.nn", "torch.distributed")
        )
    found = names[first]
    fields = getattr(found, "__dataclass_fields__", {})
    return not rest or rest[0] in fields or hasattr(found, rest[0])


def write(modules: Mapping[str, pdoc.doc.Module], folder: Path) -> None:
    """Write a page for each module, an index and the index of the search."""
    pdoc.render.configure(show_source=False, docformat="markdown")
    pdoc.render.env.filters["to_markdown"] = _html_of_docstring
    folder.mkdir(parents=True, exist_ok=True)
    for name, module in modules.items():
        page = folder / f"{name.replace('.', '/')}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(pdoc.render.html_module(module, modules), encoding="utf-8")
    (folder / "index.html").write_text(pdoc.render.html_index(modules), encoding="utf-8")
    (folder / "search.js").write_text(pdoc.render.search_index(modules), encoding="utf-8")


@pass_context
def _html_of_docstring(context: Any, docstring: str) -> str:
    source = context["module"].source_file
    return str(pdoc.docstrings.convert(markdown(docstring), "markdown", source))


def markdown(docstring: str) -> str:
    """Return a docstring of this package as Markdown: lists of parameters, and code in fences."""
    lines: list[str] = []
    block: list[str] = []
    is_list = False
    for line in [*inspect.cleandoc(docstring).splitlines(), ""]:
        follows_blank = not lines or not lines[-1]
        if block and (not line or line.startswith("    ")):
            block.append(line)
            continue
        if block:
            lines += [*_fenced(block), ""]
            block, is_list = [], False
        if line.startswith("    ") and follows_blank:
            block = [line]
        elif match := _PARAMETER.fullmatch(line) or _ERROR.fullmatch(line):
            lines += ["", f"- **{match['names']}**: {match['text']}"]
            is_list = True
        elif is_list and line and not line.startswith(" "):
            lines += ["", line]
            is_list = False
        else:
            lines.append(line.removesuffix(":") if line.endswith("::") else line)
            is_list = is_list and bool(line)
    return "\n".join([*lines, *_fenced(block)])


def _fenced(block: list[str]) -> list[str]:
    if not block:
        return []
    code = textwrap.dedent("\n".join(block)).strip()
    try:
        ast.parse(code)
        language = "python"
    except SyntaxError:
        language = "text"
    return [f"```{language}", *code.splitlines(), "```"]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
