"""Measures how much of their drafts a target accepts, drafter by drafter; `--help` lists the options."""

from __future__ import annotations

from specheads.evaluation.acceptance import main

if __name__ == "__main__":
    raise SystemExit(main())
