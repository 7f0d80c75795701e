"""What ranks exchange through the store: the values, and how many calls it costs when there are many ranks."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from serried.configs.schema.launch_plan_track import LaunchSection
from serried.runtime.rendezvous import Exchange
from serried.runtime.session import Session
from testing.rank_pool import Cluster
from testing.runs import overrides


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
    within = HashStore()  # for more ranks than may well connect to another
    stores: list[Counting] = []

    def session(rank: int) -> Session:
        made = Session((rank, rank, world, world), torch.device("cpu"), LaunchSection())
        client: Store = within
        if world <= 64:
            client = TCPStore("127.0.0.1", host.port, is_master=False, timeout=timedelta(seconds=60))
        stores.append(Counting(PrefixStore("control", client)))
        made.exchange.store = stores[-1]  # type: ignore[assignment]
        return made

    sessions = [session(rank) for rank in range(world)]
    with ThreadPoolExecutor(world) as threads:
        results = list(threads.map(function, sessions))
    return results, stores


@pytest.mark.parametrize("world", [8, *(pytest.param(world, marks=pytest.mark.slow) for world in (64, 512))])
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


def test_all_arrive_returns_the_same_answer_on_all_ranks() -> None:
    def arrive(session: Session) -> bool | None:
        return session.exchange.all_arrive("here", 30)

    def arrive_without_last(session: Session) -> bool | None:
        return None if session.rank == 3 else session.exchange.all_arrive("here", 0.2)

    assert on_ranks(4, arrive)[0] == [True] * 4
    assert on_ranks(4, arrive_without_last)[0] == [False, False, False, None]
    assert Exchange(0, 1, 1).all_arrive("here", 0)


def test_run_calls_the_store_equally_often_on_any_number_of_ranks_and_never_to_save(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    """``run_calls`` leaves out what Gloo reads to connect, and the watchdog, which has its own connection."""
    found = {}
    for ranks in (2, 4):
        argv = overrides(
            text, tmp_path / f"{ranks}", "parallel=fsdp", "trainer.steps=9", "trainer.micro_batch=1",
            f"trainer.global_batch={ranks}", "model.layers=1", "checkpoint.every=2", "checkpoint.mode=sync",
        )  # fmt: skip
        answers = cluster.run(ranks, "benchmarks.many_ranks:run_calls", argv=argv, saves=[4, 6, 8])
        found[ranks] = [answer.value for answer in answers]
    assert [saves for calls in found.values() for _, saves in calls] == [[0, 0]] * 6
    (first, second), (first_of_four, *others) = found[2], found[4]
    assert 10 < second[0] < 100
    assert (first_of_four, others) == (first, [second] * 3)


def test_rank_that_answers_and_ends_is_not_taken_for_lost() -> None:
    """It ends between a look for its answer and the look for its process."""
    exchange = Exchange(0, 2, 60)
    exchange.store = HashStore()

    def answer_and_end() -> None:
        assert exchange.store is not None
        exchange.store.set("gather/1/1", "7")
        raise RuntimeError("the process of rank 1 has ended")

    exchange.check_peers = answer_and_end
    assert exchange.gather(5) == [5, 7]
