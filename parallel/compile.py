"""torch.compile, block by block and in place: names of parameters, and hence checkpoints, stay as they are.

What autograd records is compiled, and nothing else: evaluations and generated text, whose shapes vary, run as without
it. Blocks of one form share their graphs, if what replaces a forward in them is one function for all.
"""

import logging
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from serried.configs.errors import UserError
from serried.parallel.axes.context import Ring, context_points
from serried.parallel.axes.expert import mixtures
from serried.parallel.plan import ParallelPlan


def check_blocks(
    module: nn.Module, plan: ParallelPlan, keeps_less: tuple[str, str] | None = None
) -> Sequence[str]:  # fmt: skip
    """Return the names of the blocks of ``module``. ``keeps_less``: of the trainer's section. Raises ``UserError`` if
    there are none, or they cannot be compiled."""
    if keeps_less and plan.mixtures:  # its graphs end at a mixture, and what is computed again is one graph
        raise UserError(
            f"trainer.compile=true with {keeps_less[0]} and a mixture of experts cannot be compiled; use "
            f"{keeps_less[1]}, or trainer.compile=false"
        )
    names = plan.blocks_in(module)
    if not names:
        raise UserError(
            "trainer.compile=true: the model has no repeated blocks to compile; return ParallelPlan(blocks=...) from "
            "parallel_plan(), or use trainer.compile=false"
        )
    buffers = [f"{name}.{buffer}" for name in names for buffer, _ in module.get_submodule(name).named_buffers()]
    if keeps_less and buffers:  # the second forward would change them again
        raise UserError(
            f"trainer.compile=true with {keeps_less[0]} and blocks with buffers ({buffers[0]}): a forward may "
            f"change them; use {keeps_less[1]}, or trainer.compile=false"
        )
    return names


def compile_blocks(module: nn.Module, plan: ParallelPlan, mode: str | None = None) -> int:
    """Let the blocks of ``module``, the model or a stage of it, be compiled when they first run. Returns their number.
    ``mode``: of ``torch.compile``.

    A module may define ``compile_parts`` to compile parts of itself. Call it after ``checkpoint_blocks``.
    """
    # Of selective checkpointing: that operations in place might be wrong. A test has them.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    # On GPUs torch advises TF32 for products in fp32, which is for the user to choose.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
    import torch._dynamo.config
    import torch._inductor.config  # both take long to import

    torch._inductor.config.fallback_random = True  # torch's own random numbers: dropout is as without compiling
    torch._dynamo.config.optimize_ddp = False  # it would divide the graph of a block at DDP's buckets
    for mixture in mixtures(module, plan).values():  # how many tokens an expert gets is known when the router ran
        mixture.forward = torch.compiler.disable(mixture.forward)
    for point in context_points(module, plan):
        if isinstance(point.context, Ring):  # its messages travel while something else is computed
            point.context.attend = torch.compiler.disable(point.context.attend)  # type: ignore[method-assign]
    blocks: list[Any] = [module.get_submodule(name) for name in check_blocks(module, plan)]
    here = [block for block in blocks if any(True for _ in block.parameters())]  # others are in another stage
    for part in module.modules():
        if compile_parts := getattr(part, "compile_parts", None):
            compile_parts()
    for block in here:
        block.forward = partial(_run, torch.compile(block.forward, dynamic=False, mode=mode), block.forward)
    return len(here)


def _run(compiled: Callable[..., Any], plain: Callable[..., Any], *args: Any, **named: Any) -> Any:
    return (compiled if torch.is_grad_enabled() else plain)(*args, **named)
