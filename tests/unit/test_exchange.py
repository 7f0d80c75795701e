"""What ranks exchange through the store: the values, and how many calls it costs when there are many ranks."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from serried.configs.schema.sections import LaunchSection
from serried.runtime.rendezvous import Exchange
from serried.runtime.session import Session


class Counting:
    """A store that counts calls by name, but looks for a key: they depend on how long the others take."""

    def __init__(self, store: Any) -> None:
        self._store, self.calls = store, Counter[str]()
        self.longest = 0
        """Length of the longest value written."""

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if name != "check":
                self.calls[name] += 1
            if name == "set":
                self.longest = max(self.longest, len(arguments[1]))
            return getattr(self._store, name)(*arguments)

        return call


def on_ranks(world: int, function: Callable[[Session], Any]) -> tuple[list[Any], list[Counting]]:
    """Call ``function`` in a thread for each rank. Returns the results and the stores, by rank."""
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores: list[Counting] = []

    def session(rank: int) -> Session:
        made = Session((rank, rank, world, world), torch.device("cpu"), LaunchSection())
        client = TCPStore("127.0.0.1", host.port, is_master=False, timeout=timedelta(seconds=60))
        stores.append(Counting(PrefixStore("control", client)))
        made.exchange.store = stores[-1]  # type: ignore[assignment]
        return made

    sessions = [session(rank) for rank in range(world)]
    with ThreadPoolExecutor(world) as threads:
        results = list(threads.map(function, sessions))
    return results, stores


@pytest.mark.parametrize("world", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_gather_costs_each_rank_two_calls_of_the_store(world: int) -> None:
    found, stores = on_ranks(world, lambda session: [session.gather({"rank": session.rank}), session.gather("again")])
    assert found == [[[{"rank": rank} for rank in range(world)], ["again"] * world]] * world
    assert stores[0].calls == {"set": 4, "multi_get": 2}
    assert [store.calls for store in stores[1:]] == [{"set": 2, "get": 2}] * (world - 1)


def test_ranks_with_the_same_text_exchange_a_digest() -> None:
    text = "a: 0\n" * 1000
    _, stores = on_ranks(8, lambda session: session.same_everywhere("the config", text))
    assert [store.calls for store in stores[1:]] == [{"set": 1, "get": 1}] * 7
    assert max(store.longest for store in stores) < 1000


def test_all_arrive_is_the_same_for_all_that_come() -> None:
    def arrive(session: Session) -> bool | None:
        return session.exchange.all_arrive("here", 30)

    def arrive_without_last(session: Session) -> bool | None:
        return None if session.rank == 3 else session.exchange.all_arrive("here", 0.2)

    assert on_ranks(4, arrive)[0] == [True] * 4
    assert on_ranks(4, arrive_without_last)[0] == [False, False, False, None]
    assert Exchange(0, 1, 1).all_arrive("here", 0)
