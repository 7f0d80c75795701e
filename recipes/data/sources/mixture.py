"""Mixture of several sources, each with its share of the training data."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from serried.configs.schema.data import Sources, SourceSection, sources


class MixtureSection(SourceSection):
    """Config of a mixture of other sources."""

    sources: Sources = Field(default_factory=dict)
    """Sources of the mixture, by names of your choice."""
    weigh_by: Literal["tokens", "samples"] = "tokens"
    """Unit in which the weights divide the training data."""

    def _mistakes(self) -> Iterator[str]:
        yield from super()._mistakes()
        if not self.sources:
            yield (
                "data=mixture needs sources: data.sources.NAME.name=text data.sources.NAME.path=FILE_OR_FOLDER "
                "data.sources.NAME.weight=0.7, with a NAME of your choice for each source"
            )


def _open(_: MixtureSection) -> None:
    raise AssertionError("each source of a mixture is opened alone")


sources.register("mixture", MixtureSection, lambda: _open)
