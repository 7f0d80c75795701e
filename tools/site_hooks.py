"""mkdocs hooks that add the reference of the code to the site of docs/."""

import ast
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Append the reference of every public name to reference/api.md."""
    if page.file.src_uri != "reference/api.md":
        return markdown
    return markdown + "".join(f"\n\n::: {module}.{name}" for name, module in public_names().items())


def public_names() -> dict[str, str]:
    """Return the module of each name that ``serried`` exports, without importing them."""
    tree = ast.parse((ROOT / "serried/__init__.py").read_text("utf-8"))
    tables = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict)
        and "_HOMES" in {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    )  # fmt: skip
    return {str(name): str(module) for name, module in ast.literal_eval(next(tables)).items()}
