"""torch DataLoader with `pin_memory`: its thread copies each batch into page-locked memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bench.data import Workload
from bench.loaders import NotApplicable
from bench.loaders.thread import in_thread
from bench.loaders.torch_loader import loader, put
from bench.place import Place


def start(workload: Workload, place: Place, workers: int) -> Iterator[Any]:
    if place.platform == "cpu" or not torch.cuda.is_available():
        raise NotApplicable("no page-locked memory: torch sees no GPU")
    return in_thread(put(loader(workload, workers, pinned=True), place, wait=True))
