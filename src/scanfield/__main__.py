"""`python -m scanfield` is the command `scanfield`."""

from scanfield.cli import main

raise SystemExit(main())
