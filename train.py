"""Train a recipe: ``python train.py --help``, ``torchrun --nproc_per_node=8 train.py recipe=llama8b``."""

from serried.program import run

if __name__ == "__main__":
    run()
