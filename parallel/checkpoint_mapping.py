"""Mapping of parameters to the tensors of a checkpoint, with the names and shapes that other software expects."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor

from serried.parallel.layout.shard_specs import Box


class Fragment(NamedTuple):
    """A box of a parameter, and the box of a checkpoint tensor with the same elements in the same order, or with
    permuted dims."""

    name: str
    """Name of the tensor in the checkpoint."""
    shape: tuple[int, ...]
    """Shape of the full tensor in the checkpoint."""
    ours: Box
    theirs: Box
    """Box in the checkpoint tensor. Leading dims of size 1 may be left out or added."""
    order: tuple[int, ...] = ()
    """Dims of the parameter in the order of the checkpoint tensor's dims; empty if the order is the same."""
    merged_shape: tuple[int, ...] = ()
    """Shape of the full tensor in the file if it is stored with fewer dims; empty if it is ``shape``."""

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> "Fragment":
        """Return the fragment for a checkpoint tensor that equals the parameter (the usual case)."""
        box = _all_of(shape)
        return cls(name, tuple(shape), box, box)

    @classmethod
    def entry(cls, name: str, shape: Sequence[int], index: int) -> "Fragment":
        """Return the fragment for a checkpoint tensor that is entry ``index`` of the first dim of a parameter."""
        rest = tuple(shape[1:])
        return cls(name, rest, Box((index, *(0,) * len(rest)), (1, *rest)), _all_of(rest))

    @classmethod
    def within(cls, name: str, whole: Sequence[int], dim: int, start: int, shape: Sequence[int]) -> "Fragment":
        """Return the fragment for a checkpoint tensor of shape ``whole`` that contains the parameter, from index
        ``start`` of ``dim``."""
        starts = tuple(start if index == dim else 0 for index in range(len(whole)))
        return cls(name, tuple(whole), _all_of(shape), Box(starts, tuple(shape)))

    @classmethod
    def view(cls, name: str, part: Sequence[int], offset: int, shape: Sequence[int]) -> "Fragment":
        """Return the fragment for a checkpoint tensor of shape ``part`` that is a view of the parameter, starting at
        element ``offset``."""
        starts = []
        for dim in range(len(shape)):
            start, offset = divmod(offset, prod(shape[dim + 1 :]))
            starts.append(start)
        sizes = (*(1,) * (len(shape) - len(part)), *part)
        return cls(name, tuple(part), Box(tuple(starts), sizes), _all_of(part))

    @classmethod
    def merged(cls, name: str, shape: Sequence[int], merged: Sequence[int], order: Sequence[int] = ()) -> "Fragment":
        """Return the fragment for a checkpoint tensor of shape ``merged`` that equals the parameter with neighbouring
        dims merged, after its dims are put in the ``order``."""
        ours = _all_of(shape)
        theirs = _permuted(ours, order)
        return cls(name, theirs.sizes, ours, theirs, tuple(order), tuple(merged))

    @property
    def is_whole(self) -> bool:
        """Whether the checkpoint tensor equals the parameter, apart from the name and from merged dims."""
        return not self.order and self.ours == self.theirs == _all_of(self.shape)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the full tensor in the file."""
        return self.merged_shape or self.shape

    def there(self, ours: Box) -> Box:
        """Map a box of the parameter, inside ``self.ours``, to the checkpoint tensor."""
        if self.order:
            plain = self._replace(ours=_permuted(self.ours, self.order), order=())
            return plain.there(_permuted(ours, self.order))
        extra = len(self.ours.sizes) - len(self.theirs.sizes)
        left_out, added = max(extra, 0), max(-extra, 0)
        ends = zip(self.theirs.starts[added:], self.ours.starts[left_out:], ours.starts[left_out:], strict=True)
        starts = (theirs - begin + start for theirs, begin, start in ends)
        return Box((*self.theirs.starts[:added], *starts), (*(1,) * added, *ours.sizes[left_out:]))

    def here(self, theirs: Box) -> Box:
        """Map a box of the checkpoint tensor to the parameter. Inverse of ``there``."""
        if self.order:
            plain = self._replace(ours=_permuted(self.ours, self.order), order=())
            return _permuted(plain.here(theirs), [self.order.index(dim) for dim in range(len(self.order))])
        return self._replace(ours=self.theirs, theirs=self.ours).there(theirs)


def in_order(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """Return a view of ``tensor``, a box of a parameter, with its dims in the ``order`` of a fragment."""
    return tensor.permute(*order) if order else tensor


def unchanged(name: str, shape: Sequence[int]) -> tuple[Fragment, ...]:
    """Return the mapping of a parameter that is stored unchanged, under its own name."""
    return (Fragment.whole(name, shape),)


def _all_of(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def _permuted(box: Box, order: Sequence[int]) -> Box:
    return Box(*(tuple(side[dim] for dim in order) for side in box)) if order else box
