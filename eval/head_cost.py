"""Measures what drafting with a head costs against a plain pass of its target; `--help` lists the options."""

from __future__ import annotations

from specheads.evaluation.head_cost import main

if __name__ == "__main__":
    raise SystemExit(main())
