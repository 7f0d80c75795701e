"""Train a recipe: ``python train.py --help``, ``torchrun --nproc_per_node=8 train.py recipe=llama8b``."""

import sys

from serried.program import main
from serried.runtime.exit import leave

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
