"""Every private torch name that Fusewright uses, for torch 2.10 to 2.15. Import the names from here, but those of `inductor`, which
only measurements need, from there.

Torch's own modules are imported on first use: `import fusewright` must not import Dynamo.
"""

from torch.utils import _pytree as pytree

from fusewright._torch_compat.aot import (
    LITERAL,
    SHARED_ELEMENTS,
    aot_compile,
    drop_dead_code,
    forward_results,
    is_literal,
    is_tangent,
    keep_sources,
    static_input_indices,
)
from fusewright._torch_compat.dynamo import (
    CHECKED_IN_PYTHON,
    DYNAMO,
    WHOLE,
    around_compilations,
    compiled_module,
    computes,
    enters_autocast,
    frames,
    graph_breaks,
    is_module_state,
    leave_autocast,
    leaves_autocast,
    trace_artifact,
    untraced,
)
from fusewright._torch_compat.fake import (
    fake_mode,
    fake_mode_of,
    fake_tensor,
    is_fake,
    is_wrapper,
    is_zero_tensor,
    lazy_view,
    real_tensors,
    symbolic_mode,
)
from fusewright._torch_compat.operators import (
    METADATA_OPS,
    bound_op,
    communicates,
    decomposition,
    depends_on_data,
    has_python_form,
    is_composite,
    is_elementwise_entry,
    is_higher_order,
    is_overload,
    may_return_alias,
    only_computes,
    op_database,
    op_database_lacks,
    out_of_place,
    register_quantized_decomposed,
)
from fusewright._torch_compat.runtime import (
    FROM_A_POINTER,
    PROFILING,
    autocast_enabled,
    clear_workspaces,
    current_device,
    current_stream,
    disable_autocast,
    dispatch_mode,
    empty_strided_on_device,
    intercepted,
    profiler_flag,
    profiling,
    python_dispatcher,
    several_processes,
    storage_id,
    storage_uses,
    unowned,
    without_modes,
)
from fusewright._torch_compat.sizes import (
    UNBACKED,
    SizesAssumed,
    Symbols,
    assumed_sizes,
    assuming_nothing,
    guards_hold,
    settled_size,
    shape_env_of,
    sizes_settled,
    statically_true,
    symbol_of,
    traced_size,
)
