"""The compilers that torch.compile needs. Imports none of them."""

import os
import shutil
from importlib.util import find_spec


def missing_compiler(device: str) -> tuple[str, str] | None:
    """Return what torch.compile needs for a ``device`` of this type, such as ``cpu``, and does not find here, and how
    to get it; None: nothing is missing."""
    # On a GPU Triton compiles what calls its kernels, in C.
    language, variable, usual = ("C", "CC", ["gcc", "clang"]) if device == "cuda" else ("C++", "CXX", ["g++"])
    named = os.environ.get(variable, "").split()[:1] or usual
    if not any(map(shutil.which, named)):
        return (
            f"a {language} compiler, and there is no {named[0]}",
            f"install one, name it in the environment ({variable}={usual[0]})",
        )
    if device == "cuda" and find_spec("triton") is None:
        return "Triton on a GPU", "pip install triton"
    return None
