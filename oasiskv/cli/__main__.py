"""`python -m oasiskv.cli`."""

from . import main

raise SystemExit(main())
