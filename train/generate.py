"""Has a target write the answers that draft heads are trained on; `--help` lists the options."""

from __future__ import annotations

from specheads.training.generate import main

if __name__ == "__main__":
    raise SystemExit(main())
