"""Profile a compiled model with torch's own profiler: the compiled call, and eager's kernels inside it.

`profile.export_chrome_trace("trace.json")` writes a trace for Perfetto.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function


def main() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    x = torch.randn(2, 32, 64)
    fast = torch.compile(model, backend="fusewright")
    with torch.no_grad():
        for _ in range(3):  # compile and check before profiling
            fast(x)
        with profile(activities=[ProfilerActivity.CPU]) as found, record_function("request"):
            fast(x)
    rows = found.key_averages()
    print(rows.table(sort_by="self_cpu_time_total", row_limit=8, max_name_column_width=40))
    assert any(row.key == "request" for row in rows)


if __name__ == "__main__":
    main()
