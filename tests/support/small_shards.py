"""The process that prepares data for a shared cache, with small shards: ``python -m tests.support.small_shards``."""

import sys

from serried.recipes.data.prepared import tokenize
from serried.recipes.data.prepared.shared_preparation import main

if __name__ == "__main__":
    tokenize._SHARD_BYTES = 2000
    sys.exit(main())
