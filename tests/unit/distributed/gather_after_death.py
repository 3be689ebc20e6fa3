"""Three ranks, of which rank 1 ends before it gathers. Prints what rank 0 receives, as JSON."""

from __future__ import annotations

import json
import sys

import torch
from torch import distributed, nn

from dispatch_flops import FlopCounterMode
from dispatch_flops.distributed import gather


def main(rank: int, store_path: str) -> None:
    store = distributed.FileStore(store_path, 3)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=3)
    group = distributed.group.WORLD
    model = nn.Linear(3, 5)
    with FlopCounterMode(model, display=False) as counter:
        model(torch.ones(rank + 1, 3))
    everyone = gather(counter.profile, dst=2, timeout_s=60)
    if rank == 1:
        sys.exit()
    rest = gather(counter.profile, timeout_s=2)
    assert distributed.group.WORLD is group
    found = [
        None if cluster is None else [list(cluster.ranks), cluster.missing, cluster.notes]
        for cluster in (everyone, rest)
    ]
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
