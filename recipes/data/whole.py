"""Prepared data of which nothing is kept back: what a validation set of its own is."""

from dataclasses import asdict

from recipes.data.prepare import SPLITS, Prepared, SplitSummary
from recipes.data.shards import TokenStream


class WholePrepared(Prepared):
    """As prepared, with all documents in its validation split."""

    def stream(self, split: str) -> TokenStream:
        assert split == "validation", "there is no other split"
        return TokenStream([self.folder / f"{name}.safetensors" for name in SPLITS])


def whole(prepared: Prepared) -> Prepared:
    """``prepared`` with all of its documents in one split."""
    sizes = [asdict(split) for split in prepared.splits.values()]
    everything = SplitSummary(**{name: sum(size[name] for size in sizes) for name in sizes[0]})
    return WholePrepared(
        prepared.folder, f"{prepared.key}-whole", prepared.tokenizer, dict.fromkeys(SPLITS, everything)
    )
