"""``python -m oncekey``."""

from oncekey.cli import main

raise SystemExit(main())
