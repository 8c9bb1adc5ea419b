"""`python -m services.buffer.rebuild FOLDER`: the index of a ledger that nobody serves, anew from its segments alone.

Prints what is damaged and what is there, as one JSON line; ends with 1 when something is damaged.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.rpc.log import configure_logging
from services.buffer.store.segments import SegmentStore
from services.buffer.verify import verify


def main() -> int:
    """0: whole. 1: damaged, or it cannot be opened."""
    configure_logging("buffer")
    folder = Path(sys.argv[1])
    try:
        if not (folder / "segments").is_dir():
            print(f"{folder} has no segments: name the ledger's folder, e.g. runs/NAME/ledger", file=sys.stderr)
            return 1
        store = SegmentStore(folder, keep_index=False)
        contents, snapshot = verify(store, folder / "columns"), store.load()
        store.close()
    except (HeadraceError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps({**asdict(contents), "torn_bytes": snapshot.torn_bytes, "num_damaged": snapshot.num_damaged}))
    return 1 if contents.damaged else 0


if __name__ == "__main__":
    sys.exit(main())
