"""Reference backends, always run by CI: `null` claims nothing, `interp` computes the table, `faulty` misbehaves."""

from fusewright.dynamo import entry
from fusewright.reference.faulty import Faulty
from fusewright.reference.interp import Interp
from fusewright.reference.null import Null

__all__ = ["Faulty", "Interp", "Null", "fusewright_faulty", "fusewright_interp", "fusewright_null"]

fusewright_null = entry("fusewright_null")
fusewright_interp = entry("fusewright_interp")
fusewright_faulty = entry("fusewright_faulty")
