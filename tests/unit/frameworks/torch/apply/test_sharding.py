import copy
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from memfit.core.errors import BadInput
from memfit.core.settings import Settings
from memfit.core.timeline import Category
from memfit.frameworks.torch.apply.chunked_loss import chunked_cross_entropy
from memfit.frameworks.torch.apply.sharding import shard, simulated_group, units
from memfit.frameworks.torch.shapes.origin import OriginTracker
from memfit.frameworks.torch.shapes.recorder import Recorder
from memfit.frameworks.torch.simulation.simulation import Simulation
from tests.unit.frameworks.torch.builders import AMPERE, HOST, run
from tests.unit.frameworks.torch.process_groups import leave

VOCABULARY = 8192


class Block(nn.Module):
    def __init__(self, features: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(features, 2 * features + 1)
        self.down = nn.Linear(2 * features + 1, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class LanguageModel(nn.Module):
    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _loss(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(0, VOCABULARY, (4, 5), generator=generator) for _ in range(2))  # type: ignore[return-value]


def _train(model: nn.Module, optimizer: Any, batch: Any, num_chunks: int = 1) -> None:
    optimizer.zero_grad()
    with chunked_cross_entropy(num_chunks):
        value = _loss(model, batch)
    value.backward()
    optimizer.step()


def _worst(found: Any, expected: Any) -> float:
    pairs = zip(found, expected, strict=True)
    return max(((a - b).norm() / b.norm().clamp(min=1e-12)).item() for a, b in pairs)


def _rank(rank: int, count: int, folder: str) -> None:
    """One process of a sharded training; writes how far it is from plain training."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=count)
    for offload in (False, True):
        torch.save(_outcome(rank, count, offload), os.path.join(folder, f"{offload}-{rank}.pt"))
    leave()


def _outcome(rank: int, count: int, offload: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = LanguageModel().double()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, plain)]
    identities = [id(parameter) for parameter in model.parameters()]
    # GIVEN an optimizer that has state already
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        _train(each, optimizer, _batch())
    # WHEN training goes on in shards, each process with its part of the batch
    undo = shard(model, count, offload=offload, optimizer=optimizers[0])
    part = tuple(tensor.chunk(count)[rank] for tensor in _batch())
    for _ in range(2):
        _train(model, optimizers[0], part, num_chunks=3)
        _train(plain, optimizers[1], _batch())
    gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]  # type: ignore[union-attr]
    local = sum(parameter.to_local().numel() for parameter in model.parameters())  # type: ignore[attr-defined]
    outcome = {
        "gradients": _worst(gradients, [parameter.grad for parameter in plain.parameters()]),
        "share": local / sum(parameter.numel() for parameter in plain.parameters()),
        "host": undo.host_bytes,
    }
    # THEN the same objects hold the whole again
    undo()
    undo()
    state = [[optimizer.state[p]["exp_avg"] for p in optimizer.param_groups[0]["params"]] for optimizer in optimizers]
    outcome |= {
        "parameters": _worst(model.parameters(), plain.parameters()),
        "state": _worst(*state),
        "same objects": [id(parameter) for parameter in model.parameters()] == identities,
        "same classes": type(model) is LanguageModel and type(model.blocks[0]) is Block,
        "tied": model.head.weight is model.embedding.weight,
    }
    # ... and can be trained, or sharded once more.
    _train(model, optimizers[0], _batch())
    shard(model, count)()
    return outcome


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_shards_train_as_the_whole_does(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_rank, (2, str(tmp_path)), nprocs=2)
    for offload, rank in product((False, True), range(2)):
        outcome = torch.load(tmp_path / f"{offload}-{rank}.pt")
        assert max(outcome[name] for name in ("gradients", "parameters", "state")) < 1e-12
        assert outcome["same objects"] and outcome["same classes"] and outcome["tied"]
        assert outcome["share"] == pytest.approx(0.5, abs=0.01)
        # Parameters, gradients and two moments of eight bytes each.
        expected = 4 * 8 * outcome["share"] * sum(p.numel() for p in LanguageModel().parameters())
        assert outcome["host"] == (pytest.approx(expected, rel=0.01) if offload else 0)


class TestShard:
    def test_needs_a_process_group(self) -> None:
        with pytest.raises(BadInput, match=r"isn't initialised\. Start the program with `torchrun --nproc-per-node 4"):
            shard(LanguageModel(), 4)

    def test_needs_as_many_processes_as_devices(self, tmp_path: Path) -> None:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
        try:
            with pytest.raises(BadInput, match=r"over 4 devices, but there are 1 processes.*plan for 1 devices"):
                shard(LanguageModel(), 4)
            with pytest.raises(BadInput, match="without parameters"):
                shard(nn.ReLU(), 1)
            model = nn.Linear(2, 2)
            model.factor = nn.Parameter(torch.tensor(1.0))
            with pytest.raises(BadInput, match="'factor' is a single number"):
                shard(model, 1)
        finally:
            dist.destroy_process_group()


class TestUnits:
    def test_are_the_outermost_members_of_lists(self) -> None:
        model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.Sequential(Block(), Block()))
        assert units(model) == [model[0], model[2][0], model[2][1]]
        language = LanguageModel(3)
        assert units(language) == list(language.blocks)

    def test_leave_out_blocks_that_share_parameters(self) -> None:
        model = LanguageModel(3)
        model.blocks[1].up.weight = model.blocks[0].up.weight
        assert units(model) == [model.blocks[2]]


class TestSimulatedGroup:
    def _simulation(self, device: Any) -> tuple[Simulation, Recorder]:
        origin = OriginTracker()
        recorder = Recorder(origin.current)
        return Simulation(device, recorder, origin), recorder

    def test_is_none_for_one_device(self) -> None:
        simulation, recorder = self._simulation(AMPERE)
        with simulation.running(), simulated_group(simulation, recorder, AMPERE, 1):
            assert not dist.is_initialized()

    @pytest.mark.parametrize("device", [AMPERE, HOST], ids=["cuda", "host"])
    def test_has_as_many_ranks_as_devices_and_goes_again(self, device: Any) -> None:
        simulation, recorder = self._simulation(device)
        with simulation.running(), simulated_group(simulation, recorder, device, 4):
            assert (dist.get_world_size(), dist.get_rank()) == (4, 0)
        assert not dist.is_initialized()
        assert [note.text for note in simulation.notes.found.values()] == [
            "the memory is that of rank 0 of 4; its collectives send nothing"
        ]

    def test_refuses_a_program_that_has_a_group(self, tmp_path: Path) -> None:
        simulation, recorder = self._simulation(AMPERE)
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
        try:
            with pytest.raises(BadInput, match="Make the plan first"), simulated_group(simulation, recorder, AMPERE, 2):
                pass
        finally:
            dist.destroy_process_group()


class TestTrace:
    def _kept(self, settings: Settings) -> tuple[dict[Category, int], int]:
        """(bytes that are there after two steps by category, host bytes) on the simulated device."""
        model, tokens = LanguageModel(), torch.zeros(2, 8, dtype=torch.long)
        optimizer = torch.optim.AdamW(model.parameters())
        made = run(model, (tokens, tokens), loss=_loss, optimizer=optimizer, settings=settings)
        # The user's model is what it was.
        assert type(model) is LanguageModel and not next(model.parameters()).is_meta
        kept: dict[Category, int] = {}
        for block in made.timeline.blocks:
            if block.end is None:
                kept[block.category] = kept.get(block.category, 0) + block.size_bytes
        return kept, made.host_bytes

    def test_a_device_holds_its_share(self) -> None:
        whole, _ = self._kept(Settings())
        share, host_bytes = self._kept(Settings(num_devices=4))
        for category in (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE):
            # Blocks are padded to a multiple of the devices.
            assert share[category] == pytest.approx(whole[category] / 4, rel=0.01)
        assert host_bytes == 0

    def test_offloaded_shards_are_on_the_host(self) -> None:
        whole, _ = self._kept(Settings())
        share, host_bytes = self._kept(Settings(num_devices=4, shard_offload=True))
        assert not {Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE} & set(share)
        assert host_bytes == pytest.approx(whole[Category.PARAMETER], rel=0.02)


class _ReturnsView(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).flatten(0, 1).unflatten(0, x.shape[:2])


def test_a_trace_does_not_warn_of_views() -> None:
    """A block that returns a view is nothing to warn of where there are no values; here, warnings are errors."""
    model = nn.Sequential(_ReturnsView(), _ReturnsView())
    traced = run(
        model, torch.zeros(4, 5, 16), loss=lambda model, batch: model(batch).sum(), settings=Settings(num_devices=2)
    )
    assert traced.timeline.blocks


def test_parameters_are_gathered_and_gradients_reduced_on_streams_of_their_own() -> None:
    model = nn.Sequential(*(Block() for _ in range(3)))
    traced = run(model, torch.zeros(4, 5, 16), optimizer=torch.optim.SGD, settings=Settings(num_devices=2))

    streams = {block.stream for block in traced.timeline.blocks}
    assert 0 in streams
    assert len(streams) >= 3
