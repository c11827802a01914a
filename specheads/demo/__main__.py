"""`python -m specheads.demo`."""

from . import main

raise SystemExit(main())
