"""Mixture of several sources, each with its share of the training data."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from serried.configs.schema.data import Sources, SourceSection, sources

WeighBy = Literal["tokens", "samples", "size"]
"""Unit of the weights of a mixture."""


class MixtureSection(SourceSection):
    """Config of a mixture of other sources."""

    sources: Sources = Field(default_factory=dict)
    """Sources of the mixture, by names of your choice."""
    weigh_by: WeighBy = "tokens"
    """Unit in which the weights divide the training data. ``size``: no weights; every sequence once per epoch."""

    def _mistakes(self) -> Iterator[str]:
        yield from super()._mistakes()
        if not self.sources:
            yield (
                "data=mixture needs sources: data.sources.NAME.name=text data.sources.NAME.path=FILE_OR_FOLDER "
                "data.sources.NAME.weight=0.7, with a NAME of your choice for each source"
            )
        weighted = [name for name, source in self.sources.items() if source.weight != 1]
        if self.weigh_by == "size" and weighted:
            yield (
                f"data.sources.{weighted[0]}.weight={self.sources[weighted[0]].weight:g} with data.weigh_by=size, "
                "which uses every sequence once per epoch; leave the weight out, or use data.weigh_by=samples"
            )


def _open(_: MixtureSection) -> None:
    raise AssertionError("each source of a mixture is opened alone")


sources.register("mixture", MixtureSection, lambda: _open)
