"""A process that holds the embedded server of a home until it is told to stop: `python holder.py HOME UID`."""

import json
import os
import sys
from pathlib import Path

from flowfabric.db.embedded import Embedded, EmbeddedError

home, uid = Path(sys.argv[1]), int(sys.argv[2])
if uid != os.geteuid():
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
try:
    server = Embedded.start(home)
except EmbeddedError as error:
    print(json.dumps({"error": str(error)}), flush=True)
    sys.exit(1)
print(json.dumps({"url": server.url, "pid": server.pid, "data": str(server.data)}), flush=True)
order = sys.stdin.readline().strip()
if order in ("release", "discard"):
    server.release(discard=order == "discard")
