"""Record a step on a GPU once as a CUDA graph, and start it afterwards as a whole instead of kernel by kernel.

The step of a stack of small networks is some sixty kernels of a few microseconds, and starting each from Python takes
longer than it runs. A graph reads and writes the memory that it was recorded with, so a step gets its inputs copied
into tensors of the graph's own and changes its state in place.
(https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

WARM_UP = 2
"""Steps before the recording: libraries take their workspaces in the first ones, which a graph cannot record."""

Step = Callable[[Sequence[Tensor]], Tensor]
"""Takes inputs, changes its state in place, and returns a tensor. It may not wait for the device."""


@dataclass(frozen=True)
class _Recording:
    graph: Any
    inputs: list[Tensor]
    result: Tensor


@dataclass
class Replay:
    """Steps by key; those of one key do the same to tensors of the same shapes."""

    _recordings: dict[Hashable, _Recording] = field(default_factory=dict)

    def run(self, key: Hashable, step: Step, inputs: Sequence[Tensor], state: Sequence[Tensor]) -> Tensor:
        """The step's result, by its recording; `state` is all that the step changes."""
        if key not in self._recordings:
            self._recordings[key] = record(step, inputs, state)
        recording = self._recordings[key]
        torch._foreach_copy_(recording.inputs, list(inputs))
        recording.graph.replay()
        # The next replay writes over it.
        return recording.result.clone()


def record(step: Step, inputs: Sequence[Tensor], state: Sequence[Tensor]) -> _Recording:
    """Record a step on the current CUDA device; the state is afterwards what it was before."""
    own = [tensor.clone() for tensor in inputs]
    before = [tensor.clone() for tensor in state]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step(own)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step(own)
    for tensor, value in zip(state, before, strict=True):
        tensor.copy_(value)
    return _Recording(graph, own, result)
