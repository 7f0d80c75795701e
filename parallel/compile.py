"""torch.compile, applied to each block in place, so that parameter names and checkpoints do not change.

Only forwards with gradients are compiled. Evaluation and generation, whose shapes vary, run uncompiled. Blocks of the
same structure share their graphs, provided that replaced forwards use one function for all blocks.
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
    """Return the names of the blocks of ``module``.

    ``keeps_less``: value of ``TrainerSection.keeps_less``.

    Raises:
        UserError: There are no blocks, or they cannot be compiled.
    """
    if keeps_less and plan.mixtures:
        raise UserError(
            f"trainer.compile=true with {keeps_less[0]} and a mixture of experts: recomputation needs a single graph "
            f"per block, but a mixture breaks the graph; use {keeps_less[1]}, or trainer.compile=false"
        )
    names = plan.blocks_in(module)
    if not names:
        raise UserError(
            "trainer.compile=true: the model has no repeated blocks to compile; return ParallelPlan(blocks=...) from "
            "parallel_plan(), or use trainer.compile=false"
        )
    buffers = [f"{name}.{buffer}" for name in names for buffer, _ in module.get_submodule(name).named_buffers()]
    if keeps_less and buffers:
        raise UserError(
            f"trainer.compile=true with {keeps_less[0]} and blocks with buffers ({buffers[0]}): recomputation runs the "
            f"forward again, which may update the buffers twice; use {keeps_less[1]}, or trainer.compile=false"
        )
    return names


def compile_blocks(module: nn.Module, plan: ParallelPlan, mode: str | None = None) -> int:
    """Compile the blocks of ``module``, the model or a stage of it, when they first run. Return their number.

    Call it after ``checkpoint_blocks``. A module may define ``compile_parts`` to compile parts of itself. ``mode`` is
    passed to ``torch.compile``.
    """
    # Selective checkpointing warns that in-place operations might be wrong. A test covers them.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    # On GPUs torch recommends TF32 for fp32 matrix products. That is the user's choice.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
    import torch._dynamo.config
    import torch._inductor.config  # both are slow to import

    torch._inductor.config.fallback_random = True  # the random numbers of eager mode, so dropout is the same
    torch._dynamo.config.optimize_ddp = False  # it would split a block's graph at DDP's buckets
    for mixture in mixtures(module, plan).values():  # tokens per expert are known only after the router ran
        mixture.forward = torch.compiler.disable(mixture.forward)
    for point in context_points(module, plan):
        if isinstance(point.context, Ring):  # its communication overlaps with computation
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
