"""Parallel layouts that ``serried verify`` compares with one process."""

from typing import NamedTuple

BOUNDS = {"fp32": 2e-6, "bf16": 5e-3, "fp16": 2e-3}
"""Largest relative difference of the loss from one process, by precision. NCCL and Gloo sum in different orders."""
GRAD_NORM = 5
"""Bound of the gradient norm, as a multiple of the bound of the loss."""
MIXTURE = ("model=moe_tiny", "model.dim=48", "model.expert_hidden_dim=24")
"""Overrides of a model with 8 experts."""
COMPILED = "trainer.compile=true"


class Layout(NamedTuple):
    """A run on a parallel layout, compared with one process with the same ``model`` and ``precision``."""

    name: str
    words: tuple[str, ...]
    data_ranks: int
    """Number of ranks that see different samples."""
    accumulation: int = 3
    """Number of micro-batches per step."""
    model: tuple[str, ...] = ()
    precision: str = "fp32"

    def overrides(self, global_batch: int) -> tuple[str, ...]:
        """Return the overrides of the run."""
        micro_batch = global_batch // self.data_ranks // self.accumulation
        return (*self.words, *self.model, f"precision={self.precision}", f"trainer.micro_batch={micro_batch}")

    def compiled(self) -> "Layout":
        """Return this layout with compiled blocks."""
        return self._replace(name=f"{self.name}, compiled", words=(*self.words, COMPILED))


ALONE = Layout("one process", ("parallel=single",), 1, 1)


def layouts(ranks: int, device: str) -> list[Layout]:
    """Return the layouts to compare on ``ranks`` processes. ``ranks`` is 1 or even."""
    if ranks == 1:
        found = [Layout("accumulated", ("parallel=single",), 1)]
        return [*found, *_in_other_types(found), found[0].compiled()] if device != "cpu" else found
    found = [
        Layout(f"ddp x{ranks}", ("parallel=ddp",), ranks),
        Layout(f"fsdp x{ranks}", ("parallel=fsdp",), ranks),
        _beside(ranks, "tensor"),
        _beside(ranks, "context"),
        _beside(ranks, "context", "ring", ("parallel.context_method=ring",)),
        _beside(ranks, "pipeline", accumulation=6),
        Layout(f"expert x2, fsdp x{ranks}", ("parallel=fsdp", "parallel.expert=2"), ranks, model=MIXTURE),
    ]
    if ranks >= 4:
        hybrid = ("parallel=hsdp", "parallel.replicate=2")
        found.insert(2, Layout(f"hsdp 2x{ranks // 2}", hybrid, ranks))
    if ranks % 4 == 0:
        found += [_two(ranks, "context", "tensor"), _two(ranks, "pipeline", "tensor", accumulation=6)]
    if device != "cpu":
        zbv = _beside(ranks, "pipeline", "zbv", ("parallel.pipeline_schedule=zbv",), accumulation=6)
        found += [zbv, *_in_other_types(found), found[1].compiled(), _named(found, "tensor").compiled()]
        found.append(found[1].compiled()._replace(precision="bf16"))
    return found


def _beside(
    ranks: int, axis: str, how: str = "", more: tuple[str, ...] = (), accumulation: int = 3
) -> Layout:  # fmt: skip
    """Return a layout with two ranks along ``axis``, and FSDP over the rest."""
    name = f"{axis} x2{f', {how}' if how else ''}{f', fsdp x{ranks // 2}' if ranks > 2 else ''}"
    return Layout(name, ("parallel=fsdp", f"parallel.{axis}=2", *more), ranks // 2, accumulation)


def _two(ranks: int, one: str, other: str, accumulation: int = 3) -> Layout:
    """Return a layout with two ranks along each of two axes, and FSDP over the rest."""
    name = f"{one} x2, {other} x2{f', fsdp x{ranks // 4}' if ranks > 4 else ''}"
    return Layout(name, ("parallel=fsdp", f"parallel.{one}=2", f"parallel.{other}=2"), ranks // 4, accumulation)


def _in_other_types(found: list[Layout]) -> list[Layout]:
    """Return some of the layouts in bf16 and fp16."""
    names = {"bf16": ("accumulated", "fsdp", "tensor", "context", "pipeline"), "fp16": ("accumulated", "ddp", "fsdp")}
    chosen = {precision: [_named(found, name) for name in names[precision] if _has(found, name)] for precision in names}
    return [layout._replace(precision=precision) for precision, some in chosen.items() for layout in some]


def _has(found: list[Layout], name: str) -> bool:
    return any(layout.name.startswith(name) for layout in found)


def _named(found: list[Layout], name: str) -> Layout:
    return next(layout for layout in found if layout.name.startswith(name))
