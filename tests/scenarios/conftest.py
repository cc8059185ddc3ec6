"""What runs here depends on one program that does not come with the project's dependencies."""

import shutil

from .pgbouncer import BINARY

# PgBouncer is a package of the system: its tests are part of the run where it is installed.
collect_ignore = [] if shutil.which(BINARY) else ["test_pgbouncer.py"]
