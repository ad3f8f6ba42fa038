"""What the process imports that children are forked from; see `children.PRELOAD`. Nothing else may import this."""

import os

os.setsid()  # apart from the terminal: the parent handles Ctrl-C

from fusewright import _torch_compat as compat  # noqa: E402
from fusewright.conformance.jobs import levels  # noqa: E402

assert levels
compat.op_database()  # last, as it needs packages that may be missing
